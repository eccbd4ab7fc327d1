"""What bytes and FLOPs allow: the least time of a step, a request, a workload on this machine, to hold runs against.

The same formulas as the cost model's (:mod:`sgl_shift.cost`), with everything else free: no latencies, no overhead,
each rate as measured by :func:`calibrate` or as given to ``tc``. Nothing is fitted. Over loopback bytes are free too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.replay import Record
from benchmarks.serving import Served, layout
from sgl_shift.cost import Batch, Chunk, StepCost, volumes
from sgl_shift.hardware import Efficiency, Hardware, Profile
from sgl_shift.layout import Layout
from sgl_shift.shape import ModelShape

NOTHING_LOST = Efficiency(
    gemm=1.0,
    memory=1.0,
    link=1.0,
    attention=1.0,
    moe_gemm=1.0,
    all_reduce_latency=0.0,
    exchange_latency=0.0,
    layer=0.0,
    eager_layer=0.0,
    step=0.0,
    sequence=0.0,
    request=0.0,
)


@dataclass(frozen=True)
class Machine:
    """Measured rates of one core, float32, and the link of a rank.

    Attributes:
        flops: of a GEMM of 1,024 rows; ``bandwidth``: bytes/s of a GEMV.
        link: bytes/s that a rank can send; None: nobody limits it.
    """

    cores: int
    flops: float
    bandwidth: float
    link: float | None = None

    @classmethod
    def of_gpus(cls, gpu: Hardware, ranks: int) -> Machine:
        """GPUs by their data sheet, one a rank. FP8 arithmetic is counted as 16-bit: too slow by two."""
        return cls(ranks, gpu.flops, gpu.bandwidth, gpu.link)

    def share(self, ranks: int, busy: int) -> Profile:
        """What each of ``busy`` ranks has of the machine when ``ranks`` are deployed: no more than its own threads."""
        cores = min(self.cores / busy, max(1, self.cores // ranks))
        rates = (self.bandwidth * cores, self.flops * cores, self.flops * cores)
        return Profile(Hardware("here", 0.0, *rates, self.link or float("inf")), NOTHING_LOST)


def calibrate(seconds: float = 1.0, link: float | None = None) -> Machine:
    """The best of what one thread reaches within ``seconds`` in a GEMM, and as long in a GEMV, with PyTorch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, weight, vector = torch.randn(1024, 1024), torch.randn(4096, 1024), torch.randn(4096)
        flops = 2 * 1024 * 1024 * 4096 / _best(lambda: rows @ weight.T, seconds)
        large = torch.randn(8192, 4096)  # 134 MB: no cache holds it
        bandwidth = large.nbytes / _best(lambda: large @ vector, seconds)
    finally:
        torch.set_num_threads(threads)
    return Machine(len(os.sched_getaffinity(0)), flops, bandwidth, link)


def _best(work: Any, seconds: float) -> float:
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


class Floor:
    """Least times of one deployment.

    Args:
        chunk: ``--chunked-prefill-size``.
    """

    def __init__(self, model: ModelShape, served: Served, machine: Machine, chunk: int) -> None:
        self.model, self.served, self.machine, self.chunk = model, served, machine, chunk

    def _costs(self, alone: bool) -> list[StepCost]:
        """Of the configurations that the deployment may choose from."""
        name, ranks = self.served.name, self.served.ranks
        profile = self.machine.share(ranks, 1 if name == "DP" and alone else ranks)
        both = {"TP": [Layout(ranks, 1)], "DP": [Layout(1, 1)], "SP": [Layout(ranks, ranks)]}
        layouts = both.get(name, [Layout(ranks, 1), Layout(ranks, ranks)])
        return [StepCost(self.model, profile, each, 0) for each in layouts]

    def step(self, batch: Batch, *, alone: bool = True) -> float:
        """Seconds, in the configuration that is the faster one: a floor does not depend on a threshold."""
        return min(cost.seconds(batch) - self._gathered(cost, batch) for cost in self._costs(alone))

    def _gathered(self, cost: StepCost, batch: Batch) -> float:
        """The paper's formulas gather all rows after the last layer; the engine those that the logits need, next to
        nothing."""
        elements = volumes(self.model, cost.layout, batch.tokens).all_gather if cost.layout.sp_size > 1 else 0.0
        return elements * self.model.itemsize / (self.machine.link or float("inf"))

    def prefill(self, prompt: int, cached: int = 0, *, alone: bool = True) -> float:
        """Seconds to the first token of a prompt, chunk by chunk."""
        starts = range(cached, prompt, self.chunk)
        return sum(self.step(Batch((Chunk(min(self.chunk, prompt - at), at),)), alone=alone) for at in starts)

    def decode(self, context: int) -> float:
        """Seconds of a step that generates one token of one request."""
        return self.step(Batch((), 1, context))

    def workload(self, records: Sequence[Record]) -> float:
        """Seconds of all prefills, one by one, and of all decodes in one step (weights are read at least once)."""
        done = [r for r in records if not r.error]
        prefills = sum(self.prefill(r.prompt_tokens, r.cached_tokens, alone=False) for r in done)
        decodes = sum(len(r.tokens) - 1 for r in done)
        context = sum((len(r.tokens) - 1) * (r.prompt_tokens + len(r.tokens) // 2) for r in done)
        together = prefills + (self.step(Batch((), decodes, context), alone=False) if decodes else 0.0)
        return together / self.served.replicas


def sent_bytes(model: ModelShape, split: Layout, tokens: int) -> float:
    """Bytes that one rank sends in collectives for ``tokens`` tokens, ring counting (``volumes``), without headers
    and the last gather, which is of the few rows that the logits need."""
    each = volumes(model, split, tokens)
    embedding = 2 * (split.tp_size - 1) / split.tp_size * split.rows_per_rank(tokens) * model.hidden
    return ((each.all_reduce + each.all_to_all) * model.layers + embedding) * model.itemsize


def expected_bytes(model: ModelShape, served: Served, records: Sequence[Record], used: dict[str, Any]) -> float:
    """Bytes that a rank should have sent: by the tokens that each configuration ran, as counted; for stock by the
    records. Decodes of several requests in one step pad less than one token by itself: a lower bound for SP."""
    stock = sum(r.prompt_tokens - r.cached_tokens + len(r.tokens) - 1 for r in records if not r.error)
    if not used:
        return sent_bytes(model, layout(served.name, served.ranks), stock)
    base, shift = used["tokens"]["base"], used["tokens"]["shift"]
    both = sent_bytes(model, Layout(served.ranks, served.ranks), base) if base else 0.0
    return both + (sent_bytes(model, Layout(served.ranks, 1), shift) if shift else 0.0)


def used_since(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Counters of a phase, from ``/server_info`` before and after; empty from stock SGLang."""
    if "tokens" not in after:
        return {}
    return {
        name: {key: after[name][key] - before[name][key] for key in after[name]}
        for name in ("batches", "tokens", "bytes_sent")
    }
