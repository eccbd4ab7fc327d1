"""Deployments with processes of their own: tokenizer workers, the router in front of replicas, gRPC, benchmarks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.checkpoints import DENSE, VOCAB, Tiny
from tests.servers import PYTHON, READY_SECONDS, Server, run

LENGTHS = (20, 40, 70, 12, 33, 50)  # all but one above the threshold
THRESHOLD = 16
SAMPLING = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
ARGUMENTS = ["--tp-size", "2", "--sp-size", "2", "--shift-threshold", str(THRESHOLD), "--sleep-on-idle"]
CPU = {"SGLANG_PLATFORM": "sgl_shift_cpu"}


class Words(Tiny):
    """A model with a tokenizer: one token a word."""

    def write(self, folder: Path) -> None:
        import tokenizers

        super().write(folder)
        words = tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0")
        tokenizer = tokenizers.Tokenizer(words)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


WORDS = Words(**{**dataclasses.asdict(DENSE), "name": "words"})


def prompt(length: int) -> list[int]:
    return [(7 * length + 3 * i) % VOCAB for i in range(length)]


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


@pytest.fixture
def stock(start):
    """What stock SGLang answers: tokens by length of the prompt."""
    host = start(WORDS, 2, plugin=False)
    answers = host.generate(input_ids=[prompt(n) for n in LENGTHS], sampling_params=SAMPLING)
    host.close()
    return {n: answer["output_ids"] for n, answer in zip(LENGTHS, answers, strict=True)}


def test_the_router_in_front_of_replicas_and_several_tokenizer_workers(checkpoint, stock, tmp_path):
    """Also the oldest command, ``python -m sglang.launch_server``."""
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", str(checkpoint(WORDS)), *ARGUMENTS]
    plain = Server(command, tmp_path / "plain.log", **CPU)
    workers = Server([*command, "--tokenizer-worker-num", "2"], tmp_path / "workers.log", **CPU)
    servers = [plain, workers]
    try:
        router = [PYTHON, "-m", "sglang_router.launch_router", "--worker-urls", plain.url, workers.url]
        # Its default policy, cache-aware, which with these limits also spreads a few requests.
        router += ["--balance-abs-threshold", "0", "--balance-rel-threshold", "1"]
        servers.append(Server(router, tmp_path / "router.log"))
        until_it_has_workers(servers[-1], 2)
        before = [server.wait().info()["shift_parallel"]["batches"] for server in (plain, workers)]

        def ask(length: int) -> list[int]:
            body = {"text": text(prompt(length)), "sampling_params": SAMPLING}
            return servers[-1].post("/generate", body).json()["output_ids"]

        with ThreadPoolExecutor() as clients:
            assert dict(zip(LENGTHS, clients.map(ask, LENGTHS), strict=True)) == stock
        after = [server.info()["shift_parallel"]["batches"] for server in (plain, workers)]
        for replica in range(2):
            for configuration in ("base", "shift"):
                assert after[replica][configuration] > before[replica][configuration]

        for _ in range(4):  # whichever of the workers takes it
            change = {"server_args": {"shift_mode": "sp", "shift_threshold": 9}}
            assert workers.post("/set_internal_state", change).json() == [True]
            assert workers.post("/set_internal_state", {"server_args": {"shift_mode": "both"}}).status_code == 400
        assert workers.info()["shift_parallel"]["mode"] == "sp"
    finally:
        for server in reversed(servers):
            server.close()


def until_it_has_workers(router: Server, workers: int) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        with contextlib.suppress(requests.ConnectionError):
            if requests.get(router.url + "/readiness", timeout=10).json().get("healthy_workers") == workers:
                return
        assert router.process.poll() is None, router.text()[-4000:]
        assert time.monotonic() < deadline, router.text()[-4000:]
        time.sleep(0.5)


def ask_over_grpc(port: int, lengths: list[int], answers: Any) -> None:
    """In a process of its own: gRPC starts threads, and a process that has any cannot be forked for engines."""
    import grpc
    from smg_grpc_proto import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc

    channel = grpc.insecure_channel(f"127.0.0.1:{port}")
    grpc.channel_ready_future(channel).result(timeout=READY_SECONDS)
    stub = sglang_scheduler_pb2_grpc.SglangSchedulerStub(channel)
    for length in lengths:
        request = sglang_scheduler_pb2.GenerateRequest(
            request_id=str(length),
            tokenized=sglang_scheduler_pb2.TokenizedInput(input_ids=prompt(length)),
            sampling_params=sglang_scheduler_pb2.SamplingParams(**SAMPLING),
        )
        *_, last = stub.Generate(request, timeout=120)
        answers.send(list(last.complete.output_ids))


def test_grpc(checkpoint, stock, tmp_path):
    server = Server(
        [PYTHON, "-m", "sglang.launch_server", "--model-path", str(checkpoint(WORDS)), *ARGUMENTS, "--smg-grpc-mode"],
        tmp_path / "log",
        # Its warm-up is made for vocabularies of 31,000 tokens and more.
        SMG_SGLANG_SERVICER_WARMUP="0",
        **CPU,
    )
    fork = multiprocessing.get_context("fork")
    answers, theirs = fork.Pipe(duplex=False)
    client = fork.Process(target=ask_over_grpc, args=(server.port, list(stock), theirs))
    client.start()
    theirs.close()
    try:
        for expected in stock.values():
            while not answers.poll(1):
                assert server.process.poll() is None, server.text()[-4000:]
            assert answers.recv() == expected
        log = server.text()
        for configuration in ("base", "shift"):
            assert f"configuration: {configuration}, cpu graph" in log
    finally:
        client.kill()
        client.join()
        server.close()


@pytest.mark.long
def test_a_benchmark_that_loads_no_plugins_itself(checkpoint):
    benchmark = ["sglang.benchmark.one_batch", "--model-path", str(checkpoint(WORDS)), *ARGUMENTS]
    benchmark += ["--batch-size", "2", "--input-len", "32", "--output-len", "4"]
    assert "unrecognized arguments: --sp-size 2" in run([PYTHON, "-m", *benchmark], **CPU).stderr
    result = run([PYTHON, "-m", "sgl_shift.run", *benchmark], **CPU)
    said = result.stdout + result.stderr
    assert "SP groups [[0, 1]], base-TP groups [[0], [1]]" in said
    assert "Total. latency" in result.stdout, said[-4000:]


def test_a_grpc_server_whose_ranks_lack_the_plugin_does_not_start():
    from sgl_shift.config import ShiftConfig
    from sgl_shift_patches import cli, launcher
    from sgl_shift_patches.groups import RanksDifferError

    class Arguments:
        pass

    arguments = Arguments()
    cli.mark_checked(arguments, ShiftConfig(sp_size=2))
    with pytest.raises(RanksDifferError, match="came up without Shift Parallelism"):
        launcher.start_smg_schedulers(lambda _arguments: {"status": "ready"}, arguments)
