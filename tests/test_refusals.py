"""What is not supported is refused before anything is loaded, and a rank in which something failed stops the start."""

from __future__ import annotations

import dataclasses

import pytest

from sgl_shift import support
from sgl_shift.config import ConfigError
from sgl_shift.support import RULES, RefusedError
from tests.checkpoints import DENSE, MOE
from tests.hosting import HostDied, import_sglang

MLA = dataclasses.replace(
    DENSE,
    name="mla",
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    extra={
        "kv_lora_rank": 32,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 3,
    },
)
GEMMA = dataclasses.replace(DENSE, name="gemma", architecture="GemmaForCausalLM", model_type="gemma")
ODD_HEADS = dataclasses.replace(DENSE, name="odd-heads", hidden=96, heads=6, kv_heads=3)


def resolve(folder, **arguments):
    """Resolve an Engine's arguments as its launcher does, in a process of its own."""
    from multiprocessing import get_context

    import_sglang()
    context = get_context("fork")
    ours, theirs = context.Pipe()

    def run() -> None:
        try:
            from sglang.srt.arg_groups.overrides import resolving_view
            from sglang.srt.entrypoints.engine import Engine
            from sglang.srt.plugins import load_plugins

            load_plugins()
            server_args = Engine.server_args_class(model_path=str(folder), skip_tokenizer_init=True, **arguments)
            server_args.resolve_once()
            view = resolving_view(server_args)
            theirs.send({name: getattr(view, name) for name in ("device", "dtype", "attention_backend")})
        except BaseException as error:
            ours_to_see = isinstance(error, (RefusedError, ConfigError))  # others may not survive pickling
            theirs.send(error if ours_to_see else RuntimeError(repr(error)))

    process = context.Process(target=run)
    process.start()
    result = ours.recv()
    process.join()
    if isinstance(result, BaseException):
        raise result
    return result


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (DENSE, {"tp_size": 4, "sp_size": 3}, "--sp-size 3 does not divide --tp-size 4; use --sp-size 2 or 4"),
        (DENSE, {"tp_size": 1, "sp_size": 2}, "--sp-size 2 does not divide --tp-size 1"),
        (ODD_HEADS, {"tp_size": 4, "sp_size": 2}, "6 attention heads cannot be split over --tp-size = 4"),
        (ODD_HEADS, {"tp_size": 6, "sp_size": 3}, "3 KV heads can neither be split nor replicated over the base TP"),
        (MLA, {"tp_size": 2, "sp_size": 2}, "DeepseekV2ForCausalLM uses multi-head latent attention"),
        (GEMMA, {"tp_size": 2, "sp_size": 2}, "GemmaForCausalLM is not among the architectures tested"),
        (DENSE, {"tp_size": 2, "sp_size": 2, "pp_size": 2}, "--pp-size 2: .*; use --pp-size 1"),
        (DENSE, {"tp_size": 2, "sp_size": 2, "enable_two_batch_overlap": True}, "--enable-two-batch-overlap: .*splits"),
        (DENSE, {"tp_size": 2, "sp_size": 2, "cpu_offload_gb": 1}, "--cpu-offload-gb 1: .*two"),
        (DENSE, {"tp_size": 2, "sp_size": 2, "load_format": "sharded_state"}, "--load-format sharded_state: .*auto"),
        (DENSE, {"tp_size": 2, "sp_size": 2, "enable_torch_compile": True}, "--enable-torch-compile: Dynamo"),
        (DENSE, {"tp_size": 2, "sp_size": 2, "use_ray": True}, "--use-ray: the Ray launcher"),
        (MOE, {"tp_size": 2, "sp_size": 2, "ep_size": 2}, "--ep-size 2: .*; use --ep-size 1"),
    ],
    ids=lambda p: getattr(p, "name", None),
)
def test_refused_with_what_was_asked_why_and_what_works(model, arguments, message, checkpoint):
    with pytest.raises(RefusedError, match=message):
        resolve(checkpoint(model), **arguments)


def test_all_reasons_come_at_once(checkpoint):
    with pytest.raises(RefusedError) as refusal:
        resolve(checkpoint(DENSE), tp_size=4, sp_size=3, pp_size=2, cpu_offload_gb=1)
    assert str(refusal.value).count("\n  * ") == 3


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (DENSE, {"tp_size": 4, "sp_size": 2}),
        (DENSE, {"tp_size": 4}),
        (GEMMA, {"tp_size": 2, "sp_size": 2, "shift_allow_untested_model": True}),
        # stock throughout: only the degrees have to make sense
        (DENSE, {"tp_size": 4, "sp_size": 2, "shift_mode": "tp", "debug_tensor_dump_output_folder": "/tmp"}),
    ],
    ids=["mixed", "off", "untested", "tp"],
)
def test_what_works_is_accepted(model, arguments, checkpoint):
    resolve(checkpoint(model), **arguments)


def test_the_cpu_platform_fills_in_only_what_was_not_said(checkpoint):
    chosen = resolve(checkpoint(DENSE), tp_size=2, sp_size=2)
    assert chosen == {"device": "cpu", "dtype": "float32", "attention_backend": "torch_native"}
    assert resolve(checkpoint(DENSE), tp_size=2, dtype="bfloat16")["dtype"] == "bfloat16"


def test_every_rule_names_an_option_of_this_sglang_and_passes_its_default():
    """A misspelt option would never refuse anything."""
    import msgspec

    import_sglang()
    from sglang.srt.server_args import ServerArgs

    fields = {field.name: field for field in msgspec.structs.fields(ServerArgs)}
    for rule in RULES:
        assert rule.option in fields, rule
        assert not rule.refused(fields[rule.option].default), rule
    assert len({rule.option for rule in RULES}) == len(RULES)


def test_refusals_read_what_was_resolved():
    class Arguments:
        pp_size, moe_a2a_backend, enable_eplb = 4, "deepep", False

    first, second = support.refusals(Arguments())
    assert first.startswith("--pp-size 4: ")
    assert second.endswith("use --moe-a2a-backend none")


def without_plugin(rank: int) -> None:
    """In rank 1, as if the plugin had failed there: SGLang logs that and goes on."""
    from sglang.srt.distributed import bootstrap

    if rank == 1:
        bootstrap.init_parallel_runtime = bootstrap.init_parallel_runtime.__wrapped__


def with_another_configuration(rank: int) -> None:
    from sgl_shift_patches import cli

    if rank == 1:
        right = cli.config_of
        cli.config_of = lambda args: dataclasses.replace(right(args), sp_size=4)


def with_a_hook_that_fails(rank: int) -> None:
    from sgl_shift_patches import registry

    if rank == 1:
        broken = registry.RANK[0]._replace(target=registry.RANK[0].target + "_gone")
        registry.RANK = (broken, *registry.RANK[1:])


def quickly(fault):
    def in_rank(rank: int) -> None:
        from datetime import timedelta

        from sgl_shift_patches import groups

        groups.MEETING_TIMEOUT = timedelta(seconds=8)
        fault(rank)

    return in_rank


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (without_plugin, "rank 1 did not bring Shift Parallelism up"),
        (with_another_configuration, "came up with"),
        (with_a_hook_that_fails, "these hooks into SGLang did not take hold"),
    ],
    ids=lambda p: getattr(p, "__name__", None),
)
def test_a_rank_in_which_something_failed_stops_the_start(fault, says, start, tmp_path):
    with pytest.raises((HostDied, RuntimeError)):
        start(DENSE, 4, sp_size=2, in_rank=quickly(fault))
    assert says in (tmp_path / "engine0.log").read_text()


def test_ranks_that_all_lack_the_plugin_stop_the_start_too(start, tmp_path):
    def everywhere(rank: int) -> None:
        without_plugin(1)

    with pytest.raises(Exception, match="came up without Shift Parallelism"):
        start(DENSE, 2, sp_size=2, in_rank=everywhere)


def test_debug_mode_stops_ranks_that_disagree(start, tmp_path):
    """A decision that differs would hang in the first collective; the debug mode says who wants what."""

    def disagree(rank: int) -> None:
        from sgl_shift import forward

        right = forward.choose
        if rank == 1:
            forward.choose = lambda settings, tokens, **k: right(
                dataclasses.replace(settings, threshold=settings.threshold + 1), tokens, **k
            )

    host = start(DENSE, 2, sp_size=2, shift_threshold=16, in_rank=disagree, environment={"SGL_SHIFT_DEBUG": "1"})
    host.generate(input_ids=[[1] * 16], sampling_params={"max_new_tokens": 2})
    host.flush_cache()
    host.generate(input_ids=[[1] * 18], sampling_params={"max_new_tokens": 2})
    host.flush_cache()
    with pytest.raises(HostDied):
        host.generate(input_ids=[[1] * 17], sampling_params={"max_new_tokens": 2})
    log = (tmp_path / "engine0.log").read_text()
    assert "ranks disagree on a batch: rank 0: base, 17 tokens" in log
    assert "rank 1: shift, 17 tokens" in log


def test_the_table_in_the_docs_is_the_one_that_is_enforced():
    from pathlib import Path

    from sgl_shift.features import EXPECTED, FEATURES, WORKS, markdown

    root = Path(__file__).parent.parent
    assert (root / "docs" / "support.md").read_text() == markdown(), "python -m sgl_shift.features > docs/support.md"
    for feature in FEATURES:
        assert feature.run if feature.verdict == WORKS else feature.run or feature.read, feature
        assert feature.read or feature.verdict != EXPECTED, feature
        assert not feature.run or (root / "tests" / feature.run).exists(), feature
