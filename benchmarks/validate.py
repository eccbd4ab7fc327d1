"""The cost model against every published figure: ``python -m benchmarks.validate``.

Prints a table of published, predicted and error, and writes ``benchmarks/results/validation.json``. ``--fit`` finds the
fitted parameters of :class:`sgl_shift.hardware.Efficiency` again, from the one table that they are fitted to.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import published
from benchmarks.models import CONFIGS
from benchmarks.workloads import Request, Scale, at_once, azure_code, bursty, mooncake
from sgl_shift.config import Settings
from sgl_shift.hardware import GPUS, Efficiency, Profile
from sgl_shift.layout import Layout
from sgl_shift.shape import ModelShape
from sgl_shift.simulate import Deployment, Result, Scheduler, simulate

RESULTS = Path(__file__).parent / "results"
TRACES = Path(__file__).parent.parent.parent / "shared" / "traces"

# vLLM: --gpu-memory-utilization 0.9; of that, what is neither weights nor KV cache (activations, sampler, NCCL), from
# the log of issue #175: 0.88 * 143,771 MiB - 72.7 GB of weights - 615,728 tokens * 81,920 bytes.
UTILIZATION, RESERVED = 0.9, 9.6e9
ARCTIC_THRESHOLD = 512  # its default
OUTPUT_2_7 = 250  # output tokens in 2.7, not stated there


class Row(NamedTuple):
    table: str
    what: str
    unit: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def deployments(
    model: ModelShape,
    profile: Profile,
    world: int,
    *,
    inner: int = 1,
    threshold: int = ARCTIC_THRESHOLD,
    utilization: float = UTILIZATION,
    step_tokens: tuple[int, int] = (8192, 131072),
    prefix_cache: bool = False,
) -> dict[str, Deployment]:
    """DP, TP, SP and Shift on ``world`` GPUs under vLLM and ArcticInference.

    Args:
        inner: TP degree in DP's replicas and in the base configuration.
        step_tokens: ``--max-num-batched-tokens`` of DP and TP (vLLM's default), and of SP and Shift (the artifact's).
    """
    usable = profile.hardware.memory * utilization - RESERVED
    stock, arctic = (Scheduler("vllm", tokens, 1024, prefix_cache, "least_loaded") for tokens in step_tokens)
    base = Layout(world, world // inner)

    def of(name: str, layout: Layout, **options: object) -> Deployment:
        return Deployment.of(name, model, profile, layout, usable, **options)  # type: ignore[arg-type]

    return {
        "DP": of("DP", Layout(inner, 1), replicas=world // inner, scheduler=stock),
        "TP": of("TP", Layout(world, 1), scheduler=stock),
        "SP": of("SP", base, settings=Settings(threshold, "sp"), scheduler=arctic, one_copy=True),
        "Shift": of("Shift", base, settings=Settings(threshold), scheduler=arctic),
    }


def alone(deployment: Deployment, prompt: int, output: int) -> Result:
    return simulate(deployment, at_once(1, prompt, output))


def ms(result: Result) -> tuple[float, float]:
    """Median TTFT and TPOT."""
    return 1e3 * result.median(lambda s: s.ttft), 1e3 * result.median(lambda s: s.tpot)


def latency_and_throughput(efficiency: Efficiency) -> Iterator[Row]:
    table = "2.3 Llama-70B FP8, 8 H200, 4k/250"
    for name, deployment in _llama_on_h200(efficiency).items():
        ttft, tpot, throughput = published.LATENCY_AND_THROUGHPUT[name]
        got_ttft, got_tpot = ms(alone(deployment, 4096, 250))
        if ttft:
            yield Row(table, f"{name} TTFT", "ms", ttft, got_ttft)
        yield Row(table, f"{name} TPOT", "ms", tpot, got_tpot)
        if throughput:
            yield Row(table, f"{name} throughput", "tok/s", throughput, simulate(deployment, SATURATING).throughput)


SATURATING = at_once(2000, 4096, 250)


def bursts(efficiency: Efficiency, workload: Sequence[Request] | None = None) -> Iterator[Row]:
    table = "2.4 bursts, Llama-70B FP8, 8 H200, 4k/250"
    for name, deployment in _llama_on_h200(efficiency).items():
        if name not in published.BURSTY:
            continue
        ttft, tpot, peak = published.BURSTY[name]
        result = simulate(deployment, workload or bursty())
        got_ttft, got_tpot = ms(result)
        yield Row(table, f"{name} median TTFT", "ms", ttft, got_ttft)
        yield Row(table, f"{name} median TPOT", "ms", tpot, got_tpot)
        yield Row(table, f"{name} peak throughput", "tok/s", peak, result.peak_throughput())


def azure(efficiency: Efficiency) -> Iterator[Row]:
    requests = azure_code(TRACES / "azure_code_2023.csv", Scale(seconds=900))
    for name, deployment in _llama_on_h200(efficiency).items():
        minutes = simulate(deployment, requests).seconds / 60
        yield Row("2.5 Azure code, Llama-70B FP8, 8 H200", f"{name} to play 15 min", "min", published.AZURE_MINUTES[name], minutes)


def conversation(efficiency: Efficiency) -> Iterator[Row]:
    model = ModelShape.from_config(CONFIGS["Qwen3-32B FP8"], fp8_kv=True)
    requests = mooncake(TRACES / "mooncake_conversation_15min.jsonl")
    for name, deployment in deployments(model, Profile(GPUS["h200"], efficiency), 8).items():
        minutes = simulate(deployment, requests).seconds / 60
        yield Row("2.5 Mooncake, Qwen3-32B FP8, 8 H200", f"{name} to play 15 min", "min", published.MOONCAKE_MINUTES[name], minutes)


def radar(efficiency: Efficiency) -> Iterator[Row]:
    table = "2.6 vLLM, Llama-70B FP8, 8 H200, 4k/250"
    found = _llama_on_h200(efficiency)
    for name, (throughput, generation, prefill) in published.RADAR.items():
        ttft, tpot = ms(alone(found[name], 4096, 250))
        yield Row(table, f"{name} throughput", "tok/s", throughput, simulate(found[name], SATURATING).throughput)
        yield Row(table, f"{name} generation of a request", "tok/s", generation, 1e3 / tpot)
        yield Row(table, f"{name} prefill of a request", "tok/s", prefill, 4096e3 / ttft)


def ulysses(efficiency: Efficiency) -> Iterator[Row]:
    model = ModelShape.from_config(CONFIGS["Llama-70B FP8"])
    found = deployments(model, Profile(GPUS["h100"], efficiency), 8, inner=2)
    names = {"DP": "4x(TP=2)", "TP": "TP=8", "SP": "SP=4, TP=2"}
    for length, values in published.ULYSSES_TTFT.items():
        for value, (key, name) in zip(values, names.items(), strict=True):
            ttft, _ = ms(alone(found[key], length, 1))
            yield Row("2.7 TTFT, Llama-70B FP8, 8 H100", f"{name}, {length:,} in", "ms", value, ttft)
    for length, values in published.ULYSSES_THROUGHPUT.items():
        for value, (key, name) in zip(values, names.items(), strict=True):
            count = max(32, min(2000, 4_000_000 // length))
            got = simulate(found[key], at_once(count, length, OUTPUT_2_7)).throughput
            yield Row("2.7 throughput, Llama-70B FP8, 8 H100", f"{name}, {length:,} in", "tok/s", value, got)


def issue_184(efficiency: Efficiency) -> Iterator[Row]:
    table = "2.9 issue #184, Llama-70B FP8, 4 H200, 79 at a time"
    model, profile = ModelShape.from_config(CONFIGS["Llama-70B FP8"]), Profile(GPUS["h200"], efficiency)
    for (output, prompt), (tp, *shift) in published.ISSUE_184.items():
        requests = repeated_prompts(790, 100, prompt, output)
        for name, value, threshold in [("TP", tp, 512), *zip(["Shift"] * 4, shift, published.ISSUE_184_THRESHOLDS, strict=True)]:
            found = deployments(model, profile, 4, threshold=threshold, utilization=0.88, step_tokens=(16384, 16384), prefix_cache=True)
            got = simulate(found[name], requests, concurrency=79).mean(lambda s: s.completion)
            label = "TP=4" if name == "TP" else f"SP=4, threshold {threshold}"
            yield Row(table, f"{label}, {prompt:,} in, {output:,} out", "s", value, got)


def repeated_prompts(count: int, distinct: int, prompt: int, output: int, block: int = 50) -> list[Request]:
    """``distinct`` prompts that share nothing, sent again and again in the same order."""
    whole = prompt // block
    return [
        Request(0.0, prompt, output, tuple(range(i % distinct * whole, (i % distinct + 1) * whole)), block)
        for i in range(count)
    ]


def _llama_on_h200(efficiency: Efficiency) -> dict[str, Deployment]:
    return deployments(ModelShape.from_config(CONFIGS["Llama-70B FP8"]), Profile(GPUS["h200"], efficiency), 8)


FITTED_TO = latency_and_throughput
HELD_OUT: tuple[Callable[[Efficiency], Iterator[Row]], ...] = (radar, ulysses, issue_184, azure, conversation)


def fit(start: Efficiency, rounds: int = 40) -> Efficiency:
    """The fitted parameters that minimise the squared log errors of one table: coordinate descent in the logarithm."""

    def loss(efficiency: Efficiency) -> float:
        return sum(math.log(row.predicted / row.published) ** 2 for row in FITTED_TO(efficiency))

    best, at, width = start, loss(start), 0.2
    for _ in range(rounds):
        improved = False
        for name in Efficiency.FITTED:
            for factor in (1 + width, 1 / (1 + width)):
                tried = dataclasses.replace(best, **{name: getattr(best, name) * factor})
                if max(tried.gemm, tried.memory, tried.link) <= 1 and (error := loss(tried)) < at:
                    best, at, improved = tried, error, True
        if not improved:
            width /= 2
        if width < 0.002:
            break
    return best


def median_error(rows: Iterable[Row]) -> float:
    return statistics.median(abs(row.error) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.validate", description=__doc__)
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    efficiency = fit(Efficiency()) if given.fit else Efficiency()
    if given.fit:
        for name in Efficiency.FITTED:
            print(f"{name} = {getattr(efficiency, name):.4g}")
    all_rows = []
    for table in (FITTED_TO, *HELD_OUT, bursts):
        rows = list(table(efficiency))
        all_rows.append(rows)
        for row in rows:
            print(f"{row.table:52} {row.what:38} {row.published:10,.4g} {row.predicted:10,.4g} {row.unit:6} {row.error:+7.1%}")
        print(f"   median {median_error(rows):.1%}")
    print("held out", median_error(r for rows in all_rows[1:-1] for r in rows))


if __name__ == "__main__":
    main()
