"""The first thing to run on a machine with several GPUs: ``pytest -m gpu_node``.

Stock SGLang and Shift Parallelism with FlashInfer and CUDA graphs answer the same requests: large prefills and small
ones, decode batches on either side of the threshold, prefixes written in one configuration and read in the other. In
bfloat16 they differ by rounding, so stock TP=1 says how much: base and shift may differ from stock TP=P by little more.
The same steps run on a CPU in the long tier, where float32 leaves no room.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import VOCAB, Tiny
from tests.servers import Server

# Heads as FlashInfer wants them.
MODEL = Tiny(
    "qwen3-gpu", "Qwen3ForCausalLM", "qwen3", heads=16, kv_heads=8, head_dim=64, hidden=512, intermediate=1024, layers=4
)
FEW_KV_HEADS = Tiny(
    "qwen3-gpu-2kv", "Qwen3ForCausalLM", "qwen3", heads=16, kv_heads=2, head_dim=64, hidden=512, layers=4
)
THRESHOLD = 32


def splits(worlds: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(world, sp) for world in worlds for sp in (2, 4, 8) if sp <= world]


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB) for _ in range(length)]


def ask(server: Server, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    answer = server.post(
        "/generate",
        {
            "input_ids": prompts,
            "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    )
    answer.raise_for_status()
    return [one["meta_info"] for one in answer.json()]


def workload(server: Server) -> list[list[dict[str, Any]]]:
    """The same on every server: what runs where, by THRESHOLD."""
    document = prompt(1, 600)
    server.post("/flush_cache", {})
    return [
        ask(server, [document], 4),  # prefill in base, decode in shift
        ask(server, [document + prompt(2, 20)], 4),  # reads in shift what base has written
        ask(server, [document + prompt(2, 20) + prompt(3, 300)], 4),  # and the other way round
        ask(server, [prompt(100 + i, 30) for i in range(2 * THRESHOLD)], 8),  # decodes in base
        ask(server, [prompt(200 + i, 1 + i) for i in range(THRESHOLD // 4)], 8),  # decodes in shift
    ]


def difference(answers: Any, others: Any) -> float:
    """The mean difference of the logprobs of prompts, which do not depend on what was generated."""
    pairs = [
        abs(a[0] - b[0])
        for mine, theirs in zip(answers, others, strict=True)
        for one, other in zip(mine, theirs, strict=True)
        for a, b in zip(one["input_token_logprobs"], other["input_token_logprobs"], strict=True)
        if a[0] is not None and b[0] is not None
    ]
    return sum(pairs) / len(pairs)


def first_tokens_agree(answers: Any, others: Any) -> float:
    """The share of requests whose first token is the same: what the prompt's KV is good for."""
    pairs = [
        one["output_token_logprobs"][0][1] == other["output_token_logprobs"][0][1]
        for mine, theirs in zip(answers, others, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    ]
    return sum(pairs) / len(pairs)


def serves_as_stock(start: Callable[..., Server], world: int, sp: int, exact: bool) -> dict[str, Any]:
    """What is asked of every machine. Returns what the ranks say of themselves."""
    one, stock = start("one", "--tp-size", "1"), start("stock", "--tp-size", str(world))
    noise_of, expected = workload(one.wait()), workload(stock.wait())
    one.close()
    stock.close()
    shift = ("--sp-size", str(sp), "--shift-threshold", str(THRESHOLD))
    ours = start("ours", "--tp-size", str(world), *shift).wait()
    answers = workload(ours)
    noise, off = difference(noise_of, expected), difference(answers, expected)
    print(f"P={world} SP={sp}: stock TP=1 differs from TP={world} by {noise:.2g}, ours by {off:.2g}")
    assert off < (1e-4 if exact else 2 * noise + 1e-3)
    assert first_tokens_agree(answers, expected) >= (1 if exact else first_tokens_agree(noise_of, expected) - 0.05)
    assert [[m["cached_tokens"] for m in step] for step in answers] == [
        [m["cached_tokens"] for m in step] for step in expected
    ]
    again = workload(ours)  # the same batches, out of the same graphs
    assert difference(again, answers) <= (1e-4 if exact else noise + 1e-3)
    state = ours.info()["shift_parallel"]
    assert min(state["batches"].values()) > 10, state
    assert state["switches"] >= 8
    return state


@pytest.fixture
def start(tmp_path: Path, checkpoint: Callable[[Tiny], Path]) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start_server(name: str, *flags: str, model: Tiny = MODEL, options: tuple[str, ...] = ()) -> Server:
        command = [sys.executable, "-m", "sgl_shift.launch_server", "--model-path", str(checkpoint(model))]
        common = ("--skip-tokenizer-init", "--max-running-requests", "128", "--random-seed", "1")
        servers.append(Server([*command, *common, *options, *flags], tmp_path / f"{name}.log"))
        return servers[-1]

    yield start_server
    for server in servers:
        server.close()


@pytest.mark.gpu_node
@pytest.mark.parametrize("model", [MODEL, FEW_KV_HEADS], ids=lambda model: model.name)
@pytest.mark.parametrize("graphs", ["graphs", "eager"])
@pytest.mark.parametrize(("world", "sp"), splits((2, 4, 8)))
def test_on_gpus(world, sp, graphs, model, start):
    if torch.cuda.device_count() < world:
        pytest.skip(f"{world} GPUs are needed, {torch.cuda.device_count()} found")
    options = ("--dtype", "bfloat16", "--mem-fraction-static", "0.5", "--attention-backend", "flashinfer")
    options += ("--cuda-graph-max-bs-decode", "96") if graphs == "graphs" else ("--disable-cuda-graph",)

    def start_on_gpus(name: str, *flags: str) -> Server:
        return start(name, *flags, model=model, options=options)

    state = serves_as_stock(start_on_gpus, world, sp, exact=False)
    held = state["graphs"].get("decode", {})
    assert set(held) == ({"base", "shift"} if graphs == "graphs" else set()), state["graphs"]


@pytest.mark.long
def test_the_same_on_a_cpu(start):
    def start_on_cpu(name: str, *flags: str) -> Server:
        return start(name, *flags, options=("--dtype", "float32", "--max-total-tokens", "16384"))

    serves_as_stock(start_on_cpu, 2, 2, exact=True)
