"""The workloads of the comparison: what arrives when, how long it is, what it shares.

Recorded traces are read by :mod:`sgl_shift.traces`; here are the synthetic ones (section 3 of the paper notes). All are
lists of :class:`~sgl_shift.traces.Request` in order of arrival, deterministic in their arguments. To replay one on a
server, send ``prompt_ids(request, index, vocabulary)`` at ``request.arrival`` and generate ``request.output_tokens``.
``python -m benchmarks.workloads NAME`` describes one.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from sgl_shift.traces import Request, Scale, azure_code, load, mooncake, prompt_ids

__all__ = [
    "PATTERNS",
    "Request",
    "Scale",
    "always_base",
    "always_shift",
    "at_once",
    "azure_code",
    "bursty",
    "constant_rate",
    "frequent_switches",
    "input_lengths",
    "load",
    "mooncake",
    "prompt_ids",
    "rate_sweep",
]


def at_once(count: int, prompt: int, output: int) -> list[Request]:
    """Saturation: ``count`` requests at time 0."""
    return [Request(0.0, prompt, output)] * count


def constant_rate(
    rate: float, seconds: float, prompt: int, output: int, *, poisson: bool = False, seed: int = 0
) -> list[Request]:
    """``rate`` requests a second, evenly spaced, or with exponential gaps of that mean."""
    random_gaps, at, requests = random.Random(seed), 0.0, []
    while at < seconds:
        requests.append(Request(at, prompt, output))
        at += random_gaps.expovariate(rate) if poisson else 1 / rate
    return requests


def rate_sweep(rates: Iterable[float], seconds: float, prompt: int, output: int) -> dict[float, list[Request]]:
    """Latency against arrival rate (experiment E5)."""
    return {rate: constant_rate(rate, seconds, prompt, output, poisson=True) for rate in rates}


def input_lengths(lengths: Iterable[int], count: int, output: int) -> dict[int, list[Request]]:
    """Latency and throughput against input length (E6): ``count`` requests a length, one after the other if replayed
    with a concurrency of 1."""
    return {length: at_once(count, length, output) for length in lengths}


def bursty(
    *,
    seconds: float = 300.0,
    rate: float = 1.0,
    burst_size: int = 200,
    burst_every: float = 60.0,
    burst_seconds: float = 5.0,
    prompt: int = 4096,
    output: int = 250,
    spread: float = 0.0,
    scale: float = 1.0,
    seed: int = 0,
) -> list[Request]:
    """A steady interactive stream with bursts on top (E2; the paper's own burst parameters are not known).

    Args:
        rate: of the steady stream, requests/s, with exponential gaps.
        burst_size, burst_every, burst_seconds: so many requests, over so many seconds, first after half a period.
        spread: lengths vary evenly within this part of their mean, 0.2 for 20%.
        scale: factor on prompt and output, for small machines.
    """
    rng = random.Random(seed)

    def request(at: float) -> Request:
        lengths = [max(1, round(n * scale * rng.uniform(1 - spread, 1 + spread))) for n in (prompt, output)]
        return Request(at, *lengths)

    requests, at = [], rng.expovariate(rate) if rate else seconds
    while at < seconds:
        requests.append(request(at))
        at += rng.expovariate(rate)
    start = burst_every / 2
    while start < seconds:
        requests += [request(start + i * burst_seconds / burst_size) for i in range(burst_size)]
        start += burst_every
    return sorted(requests)


# The three functional patterns of section 3.3. ``scale`` shrinks lengths and counts alike.


def always_base(scale: float = 1.0) -> list[Request]:
    """1,024 requests at once, 8,192 in, 128 out: every step is above a threshold of 64, decodes included."""
    return at_once(_scaled(1024, scale), _scaled(8192, scale), _scaled(128, scale))


def always_shift(scale: float = 1.0) -> list[Request]:
    """One request, 256 in, 8,192 out: never above a threshold of 512, prefill included."""
    return at_once(1, _scaled(256, scale), _scaled(8192, scale))


def frequent_switches(scale: float = 1.0) -> list[Request]:
    """100 bursts, one every 500 ms, of 100 requests, 128 in, 64 out: some 200 switches around a threshold of 64."""
    bursts, size = _scaled(100, scale), _scaled(100, scale)
    one = Request(0.0, _scaled(128, scale), _scaled(64, scale))
    return [one._replace(arrival=burst * 0.5) for burst in range(bursts) for _ in range(size)]


PATTERNS = {"always-base": always_base, "always-shift": always_shift, "frequent-switches": frequent_switches}


def _scaled(number: int, scale: float) -> int:
    return max(1, round(number * scale))


def describe(requests: Sequence[Request]) -> str:
    """Lengths, rate, burstiness and sharing in one line each."""
    span = max(r.arrival for r in requests) or 1.0
    per_second: dict[int, int] = {}
    for request in requests:
        per_second[int(request.arrival)] = per_second.get(int(request.arrival), 0) + 1
    lines = [f"{len(requests):,} requests in {span:,.0f} s, at most {max(per_second.values())} in one second"]
    for name, lengths in (
        ("prompt", [r.prompt_tokens for r in requests]),
        ("output", [r.output_tokens for r in requests]),
    ):
        lines.append(
            f"{name}: mean {statistics.mean(lengths):,.0f}, median {statistics.median(lengths):,.0f}, "
            f"max {max(lengths):,}, {sum(lengths) / span:,.0f} tokens/s"
        )
    total = sum(r.prompt_tokens for r in requests)
    lines.append(f"shared with an earlier request: {shared_tokens(requests) / total:.1%} of the prompt tokens")
    return "\n".join(lines)


def shared_tokens(requests: Iterable[Request]) -> int:
    """Prompt tokens that an unbounded prefix cache would already hold."""
    seen: set[int] = set()
    shared = 0
    for request in requests:
        for position, block in enumerate(request.blocks):
            if block not in seen:
                break
            shared += min(request.block, request.prompt_tokens - position * request.block)
        seen.update(request.blocks)
    return shared


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.workloads", description="Describe a workload.")
    parser.add_argument("workload", help=f"a trace file (.csv, .jsonl), bursty, {', '.join(PATTERNS)}")
    parser.add_argument("--time", type=float, default=1.0)
    parser.add_argument("--tokens", type=float, default=1.0)
    parser.add_argument("--start", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=900.0)
    given = parser.parse_args()
    if given.workload in PATTERNS:
        requests = PATTERNS[given.workload](given.tokens)
    elif given.workload == "bursty":
        requests = bursty(seconds=given.seconds, scale=given.tokens)
    else:
        requests = load(Path(given.workload), Scale(given.time, given.tokens, given.start, given.seconds))
    print(describe(requests))


if __name__ == "__main__":
    main()
