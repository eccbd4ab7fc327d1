"""Servers as users start them, with SGLang's own way of starting processes, and the clients that users have."""

from __future__ import annotations

import json
import re
from pathlib import Path

import openai
import pytest
import requests

from sgl_shift import demo
from tests.checkpoints import DENSE
from tests.servers import PYTHON, Server, run, user

LONG = "The quick brown fox jumps over the lazy dog. " * 45 + "Which animal jumps?"  # more than 256 tokens
ADMIN = {"Authorization": "Bearer admin-secret"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """The demo, and stock SGLang without the plugin on the same model: (ours, stock)."""
    folder = tmp_path_factory.mktemp("servers")
    model = str(demo.model_folder())
    ours = Server(
        [PYTHON, "-m", "sgl_shift.launch_server", "--sleep-on-idle", "--admin-api-key", "admin-secret"],
        folder / "ours.log",
    )
    stock = Server(
        [
            PYTHON,
            "-m",
            "sglang.launch_server",
            "--model-path",
            model,
            "--tp-size",
            str(demo.WORLD_SIZE),
            "--sleep-on-idle",
        ],
        folder / "stock.log",
        SGLANG_PLUGINS="none",
        SGLANG_PLATFORM="sgl_shift_cpu",
    )
    try:
        yield ours.wait(), stock.wait()
    finally:
        ours.close()
        stock.close()


def test_the_demo_answers_in_both_configurations_as_stock_does(servers):
    ours, stock = servers
    before = ours.info()["shift_parallel"]
    assert "Paris" in ours.chat("What is the capital of France?")
    assert ours.chat(LONG) == stock.chat(LONG)
    after = ours.info()["shift_parallel"]
    for configuration in ("base", "shift"):
        assert after["batches"][configuration] > before["batches"][configuration]
    assert after["tokens"]["base"] > 256


def test_server_info_and_log_show_what_runs(servers):
    ours, stock = servers
    ours.chat(LONG + " Tell me now.", 4)
    state = ours.info()["shift_parallel"]
    assert {name: state[name] for name in ("world_size", "sp_size", "base_tp_size", "mode", "kv_replication")} == {
        "world_size": 3,
        "sp_size": 3,
        "base_tp_size": 1,
        "mode": "shift",
        "kv_replication": 1,
    }
    assert state["threshold"] == 256
    # Linear weights are cut in three in TP; SP holds them whole (SmolLM2: 134.5 M parameters, float32).
    assert 134e6 * 4 < state["weight_bytes"]["base"] < 136e6 * 4
    assert state["weight_bytes"]["resident"] < 1.02 * state["weight_bytes"]["base"]  # the embedding is tied
    assert state["weight_bytes"]["base"] / 3.1 < state["weight_bytes"]["shift"] < state["weight_bytes"]["base"] / 2.9
    assert "shift_parallel" not in stock.info()
    assert requests.get(ours.url + "/metrics", timeout=60).status_code == 404  # without --enable-metrics
    log = ours.text()
    assert re.search(r"Prefill batch.*configuration: base, cpu graph", log)
    assert re.search(r"Prefill batch.*configuration: shift, cpu graph", log)
    for line in ("SP groups [[0, 1, 2]], base-TP groups [[0], [1], [2]]", "32768 KV tokens fit", "mode shift"):
        assert line in log


def test_openai_client_streaming_and_not(servers):
    answers = []
    for server in servers:
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        for prompt in ("Name three colours.", LONG):
            common = {"model": "demo", "temperature": 0, "max_tokens": 8, "messages": [user(prompt)]}
            whole = client.chat.completions.create(**common).choices[0].message.content
            pieces = [c.choices[0].delta.content or "" for c in client.chat.completions.create(**common, stream=True)]
            assert "".join(pieces) == whole
            answers.append(whole)
    assert answers[:2] == answers[2:]


def test_frontend_program(servers):
    import sglang as sgl

    @sgl.function
    def program(s, topic, long):
        s += (LONG + " " if long else "") + f"A note on {topic}:"
        s += sgl.gen("answer", max_tokens=6, temperature=0)
        forks = s.fork(2)
        for index, fork in enumerate(forks):
            fork += f"\nPoint {index + 1}:"
            fork += sgl.gen("point", max_tokens=5, temperature=0)
        s += "\nPoints:" + forks[0]["point"] + forks[1]["point"] + "\nFruit, yes or no:"
        s += sgl.select("fruit", choices=[" yes", " no"])

    results = []
    for server in servers:
        backend = sgl.RuntimeEndpoint(server.url)
        for long in (False, True):
            state = program.run(topic="apples", long=long, backend=backend)
            results.append((state["answer"], state["fruit"], state.text()))
    assert results[:2] == results[2:]


def test_bench_serving(servers, tmp_path):
    ours, _ = servers
    before = ours.info()["shift_parallel"]["batches"]
    options = {
        "backend": "sglang",
        "port": ours.port,
        "dataset-name": "random-ids",
        "random-input-len": 400,
        "random-output-len": 4,
        "random-range-ratio": 0.7,
        "num-prompts": 4,
        "tokenizer": demo.model_folder(),
        "output-file": tmp_path / "bench.jsonl",
    }
    result = run([PYTHON, "-m", "sglang.bench_serving", *(str(p) for k, v in options.items() for p in (f"--{k}", v))])
    assert result.returncode == 0, result.stderr[-3000:]
    assert json.loads((tmp_path / "bench.jsonl").read_text().splitlines()[-1])["completed"] == 4
    assert ours.info()["shift_parallel"]["batches"]["base"] > before["base"]


def test_threshold_and_mode_of_a_running_server(servers):
    ours, _ = servers

    def ask(**settings):
        return ours.post("/set_internal_state", {"server_args": settings}, **ADMIN)

    def now():
        state = ours.info()["shift_parallel"]
        return state["threshold"], state["mode"]

    try:
        assert ours.post("/set_internal_state", {"server_args": {"shift_threshold": 9}}).status_code in (401, 403)
        assert ask(shift_threshold=9, shift_mode="sp").json() == [True]
        assert now() == (9, "sp")
        before = ours.info()["shift_parallel"]["tokens"]
        assert "Paris" in ours.chat("What is the capital of France?")
        after = ours.info()["shift_parallel"]["tokens"]
        assert after["base"] > before["base"]
        assert after["shift"] == before["shift"]
        assert ask(shift_threshold=0).json() == [False]
        assert ask(shift_threshold=12.5).json() == [False]
        assert ask(shift_mode=7).json() == [False]
        assert ask(unknown=1).json() == [False]
        wrong = ask(shift_mode="both")
        assert wrong.status_code in (400, 422)
        assert "use one of shift, sp, tp" in wrong.text
        assert now() == (9, "sp")
    finally:
        assert ask(shift_threshold=256, shift_mode="shift").json() == [True]


def test_weights_of_a_running_server(servers):
    """That new ones reach both configurations is tested in ``test_weights.py``."""
    ours, stock = servers
    body = {"model_path": str(demo.model_folder())}
    answer = requests.post(ours.url + "/update_weights_from_disk", json=body, headers=ADMIN, timeout=120)
    assert answer.json()["success"], answer.text
    assert "Paris" in ours.chat("What is the capital of France?")
    assert ours.chat(LONG + " Now?", 8) == stock.chat(LONG + " Now?", 8)


def test_config_file_and_environment_through_sglang_serve(checkpoint, tmp_path):
    """An existing deployment: SGLang's own command, flags in a file, the rest in the container's environment."""
    config = {"tp-size": 2, "sp-size": 2, "skip-tokenizer-init": True}
    (tmp_path / "config.yaml").write_text("\n".join(f"{k}: {json.dumps(v)}" for k, v in config.items()))
    sglang = str(Path(PYTHON).parent / "sglang")
    server = Server(
        [sglang, "serve", "--model-path", str(checkpoint(DENSE)), "--config", str(tmp_path / "config.yaml")],
        tmp_path / "log",
        SGLANG_PLATFORM="sgl_shift_cpu",
        SGL_SHIFT_THRESHOLD="5",
        SGL_SHIFT_SP_SIZE="1",
    )
    try:
        server.wait()
        state = server.info()["shift_parallel"]
        assert (state["sp_size"], state["threshold"]) == (2, 5)  # the file beats the environment
        body = {"input_ids": [1, 2, 3, 4, 5, 6, 7], "sampling_params": {"max_new_tokens": 3}}
        server.post("/generate", body).raise_for_status()
        after = server.info()["shift_parallel"]["tokens"]
        assert after["base"] - state["tokens"]["base"] == 7
        assert after["shift"] - state["tokens"]["shift"] in (2, 3)
    finally:
        server.close()


def test_a_deployment_that_cannot_work_ends_with_the_reason(tmp_path):
    result = run([PYTHON, "-m", "sgl_shift.launch_server", "--sp-size", "2"])
    assert result.returncode == 2
    assert "--sp-size 2 does not divide --tp-size 3; use --sp-size 3" in result.stderr
    assert "Load weight begin" not in result.stderr + result.stdout
