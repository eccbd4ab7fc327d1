"""The planner: what it prints, that its commands are ours, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

import pytest

from benchmarks.models import CONFIGS
from sgl_shift import config, plan
from sgl_shift.hardware import GPUS, Profile
from sgl_shift.layout import HeadLayout, Layout
from sgl_shift.shape import ModelShape
from tests.servers import PYTHON, run
from tests.test_workloads import MOONCAKE


@pytest.fixture
def model(tmp_path):
    def write(name: str, **changes: object) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
        return str(tmp_path)

    return write


def planned(capsys, *arguments: str) -> str:
    assert plan.main(arguments) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    assert plan.main(arguments) == 1
    return capsys.readouterr().err


def options(command: str) -> dict[str, str]:
    words = shlex.split(command)
    return dict(zip(words[3::2], words[4::2], strict=True))


def recommended(out: str) -> str:
    return re.search(r"Recommended .*\n  (python -m .*)", out)[1]


def test_llama_70b_on_eight_h200(capsys, model):
    path = model("Llama-70B FP8")
    out = planned(capsys, "--model-path", path, "--gpu", "h200", "--num-gpus", "8")
    command = recommended(out)
    assert command.startswith(f"python -m sgl_shift.launch_server --model-path {path} --tp-size 8 ")
    given = options(command)
    # What the command says is what the engine takes, with its own checks.
    shift = config.resolve({"sp_size": given["--sp-size"], "shift_threshold": given["--shift-threshold"]}, environ={})
    HeadLayout(Layout(int(given["--tp-size"]), shift.sp_size), 64, 8)
    assert shift.sp_size == 8
    assert given["--chunked-prefill-size"] == "8192"
    assert 64 < shift.settings.threshold < 2048
    assert "against TP=8: TTFT 0." in out
    assert "against DP=8: TTFT 0." in out


def test_a_model_that_fits_twice_nowhere_stays_in_tp(capsys, model):
    out = planned(capsys, "--model-path", model("Llama-4-Scout"), "--gpu", "a100", "--num-gpus", "4")
    assert recommended(out).startswith("python -m sglang.launch_server")
    assert "--sp-size" not in recommended(out)
    assert "not possible: SP=4, TP=1: weights take 262.3 GB a GPU, 70.9 GB are there" in out
    assert "Shift does not pay here" in out


def test_a_small_mixture_is_better_off_with_replicas(capsys, model):
    out = planned(capsys, "--model-path", model("Qwen3-30B-A3B"), "--gpu", "h100", "--num-gpus", "8")
    assert "--dp-size" in recommended(out)
    assert "Shift does not pay here" in out
    assert "KV tokens instead of" in out
    assert "tokens only: a prompt of 4,096 runs in TP" in out


def test_a_slow_link_makes_shift_pay(capsys, model, tmp_path):
    gpu = GPUS["a100"]
    slow = {**gpu.__dict__, "name": "slow", "link": gpu.link / 10}
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    arguments = ("--model-path", model("Qwen3-32B FP8"), "--num-gpus", "4")
    out = planned(capsys, *arguments, "--gpu", str(tmp_path / "slow.json"))
    assert "--sp-size 4" in recommended(out)


def test_the_goal_decides(capsys, model):
    arguments = ("--model-path", model("Qwen3-32B FP8"), "--gpu", "h100", "--num-gpus", "4")
    assert "--dp-size" in recommended(planned(capsys, *arguments, "--goal", "throughput"))
    assert "--sp-size 4" in recommended(planned(capsys, *arguments))
    alone = recommended(planned(capsys, *arguments, "--goal", "latency"))
    assert "--tp-size 4" in alone  # of 250 tokens, TPOT is most of an answer, and that is TP's either way
    assert "--sp-size" not in alone


def test_flags_are_planned_with_and_handed_on(capsys, model):
    out = planned(
        capsys,
        *("--model-path", model("Llama-70B"), "--gpu", "h200", "--num-gpus", "4", "--quantization", "fp8"),
        *("--kv-cache-dtype", "fp8_e4m3", "--chunked-prefill-size", "4096"),
    )
    assert "72.7 GB of weights" in out
    assert recommended(out).endswith("--chunked-prefill-size 4096 --quantization fp8 --kv-cache-dtype fp8_e4m3")


def test_one_gpu_is_not_split(capsys, model):
    out = planned(capsys, "--model-path", model("Llama-8B"), "--gpu", "h100", "--num-gpus", "1")
    assert "one GPU cannot be split" in out


def test_a_trace_is_replayed(capsys, model, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, MOONCAKE)))
    arguments = ("--model-path", model("Qwen3-32B FP8"), "--gpu", "h100", "--num-gpus", "4")
    out = planned(capsys, *arguments, "--trace", str(trace))
    assert "trace TTFT" in out
    assert "refused" not in out
    assert "a trace is a .csv" in refused(capsys, *arguments, "--trace", "x.txt")


@pytest.mark.parametrize(
    ("changes", "gpus", "message"),
    [
        ({"architectures": ["NewForCausalLM"]}, "8", "NewForCausalLM is not among the architectures tested"),
        ({"kv_lora_rank": 512}, "8", "multi-head latent attention"),
        ({"num_hidden_layers": None}, "8", "no num_hidden_layers"),
        ({"num_hidden_layers": 4000}, "1", "no way to run this model on these GPUs"),
    ],
)
def test_what_the_project_refuses_is_refused(capsys, model, changes, gpus, message):
    path = model("Llama-70B", **changes)
    assert message in refused(capsys, "--model-path", path, "--gpu", "h200", "--num-gpus", gpus)


def test_an_untested_model_can_be_planned_if_it_is_asked_for(capsys, model):
    path = model("Llama-70B FP8", architectures=["NewForCausalLM"])
    arguments = ("--model-path", path, "--gpu", "b200", "--num-gpus", "2", "--shift-allow-untested-model")
    out = planned(capsys, *arguments)
    assert "NewForCausalLM, 72.7 GB" in out
    ours = recommended(out).startswith("python -m sgl_shift")
    assert recommended(out).endswith("--shift-allow-untested-model") == ours


def test_splits_that_the_layout_refuses_are_named(capsys, model):
    out = planned(capsys, "--model-path", model("Qwen3-32B FP8"), "--gpu", "h200", "--num-gpus", "6")
    assert "not possible: SP=6, TP=1: 64 attention heads cannot be split over --tp-size = 6" in out


def test_memory_is_that_of_sglang():
    # arg_groups/memory_hook.py: 512 + 1.5 * 8192 + 1024 + 2 * 512 MiB are kept free of 143,771.
    usable = plan.usable_bytes(GPUS["h200"].memory, 8, 8192)
    assert usable / plan.MIB == 143_771 - (512 + 12_288 + 1024 + 1024)
    assert [plan.default_chunk(GPUS[gpu].memory) for gpu in ("a100", "h200", "b200")] == [8192, 8192, 16384]


def test_the_threshold_is_where_the_base_configuration_becomes_the_faster_one():
    model, profile = ModelShape.from_config(CONFIGS["Llama-70B FP8"]), Profile(GPUS["h200"])
    found, _ = plan.plans(model, profile, 8, plan.Workload(1024, 2))
    for one in found:
        if one.deployment.base is not None:
            at = one.deployment.settings.threshold
            for tokens in (at, at + 16, 4096):
                batch = plan.Batch((plan.Chunk(tokens),))
                base, shift = one.deployment.base.seconds(batch), one.deployment.shift.seconds(batch)
                assert (base < shift) == (tokens > at)


def test_the_planner_needs_neither_torch_nor_sglang():
    code = "import sys, sgl_shift.plan; print([m for m in ('torch', 'sglang', 'numpy') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


@pytest.mark.long
def test_the_doctor_accepts_the_recommended_command(capsys, model):
    out = planned(capsys, "--model-path", model("Llama-70B"), "--gpu", "h200", "--num-gpus", "8")
    arguments = shlex.split(recommended(out))[3:]
    verdict = run([PYTHON, "-m", "sgl_shift.doctor", *arguments, "--skip-tokenizer-init"])
    assert "Verdict: healthy" in verdict.stdout
