"""Who holds what: ranks, groups and heads under Shift Parallelism.

A world of P ranks serves one model replica. In the base configuration it is factored into an SP degree ``sp`` and an
inner TP degree ``tp = P // sp``. SP groups are contiguous ranks and base-TP groups are strided, because then the heads
that rank ``r`` works on after the Ulysses exchange are exactly head block ``r``, the block that full TP puts there:
nothing has to be permuted for both configurations to share one KV cache (the paper's KV-cache invariance; section
1.4 of the notes in ``docs/walkthrough.md``).

Pure arithmetic: no torch, no SGLang.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple


class LayoutError(ValueError):
    """A combination of world size, SP degree and head counts that Shift Parallelism cannot run."""


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


class Slice(NamedTuple):
    """The rows of a batch that one SP rank works on, in a batch padded to ``sp * rows`` rows."""

    start: int  # first row, in the padded batch
    rows: int  # rows a rank, padding included; the same on every rank
    real: int  # of these, rows that are tokens; the others are padding, always at the end


@dataclass(frozen=True)
class Layout:
    """Factorisation of the world into SP groups and base-TP groups.

    P = 8, sp = 4, tp = 2::

        SP groups [0 1 2 3] [4 5 6 7]      base-TP groups [0 4] [1 5] [2 6] [3 7]
    """

    world_size: int
    sp_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.sp_size < 1 or self.world_size % self.sp_size:
            choices = [d for d in divisors(max(self.world_size, 1)) if d > 1]
            advice = f"use --sp-size {_any_of(choices)}" if choices else "raise --tp-size to the number of GPUs"
            raise LayoutError(f"--sp-size {self.sp_size} does not divide --tp-size {self.world_size}; {advice}")

    @property
    def tp_size(self) -> int:
        """TP degree inside the base configuration."""
        return self.world_size // self.sp_size

    def sp_rank(self, rank: int) -> int:
        return rank % self.sp_size

    def base_tp_rank(self, rank: int) -> int:
        return rank // self.sp_size

    @property
    def sp_groups(self) -> list[list[int]]:
        return [list(range(t * self.sp_size, (t + 1) * self.sp_size)) for t in range(self.tp_size)]

    @property
    def base_tp_groups(self) -> list[list[int]]:
        return [list(range(s, self.world_size, self.sp_size)) for s in range(self.sp_size)]

    def rows_per_rank(self, num_tokens: int) -> int:
        """Rows that each SP rank gets of a batch of ``num_tokens`` tokens, padded to a multiple of ``sp_size``."""
        return -(-num_tokens // self.sp_size)

    def slice_of(self, rank: int, num_tokens: int) -> Slice:
        rows = self.rows_per_rank(num_tokens)
        start = self.sp_rank(rank) * rows
        return Slice(start, rows, min(max(num_tokens - start, 0), rows))

    def base_tp_crosses(self, nodes: int) -> bool:
        """Whether the base configuration's all-reduces leave a node, with the ranks in order over ``nodes`` nodes."""
        each = max(1, self.world_size // nodes)
        return any(len({rank // each for rank in group}) > 1 for group in self.base_tp_groups)

    def digest(self) -> int:
        """A short number that differs between layouts; ranks compare it before they exchange anything."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:4], "big")


@dataclass(frozen=True)
class HeadLayout:
    """How a model's attention heads lie on the ranks of a :class:`Layout`.

    Base-TP rank t holds query heads [t*h/tp, (t+1)*h/tp); the exchange hands the s-th part of those to SP rank s,
    which is block ``t*sp + s = r``: what full TP puts on rank r. KV heads follow the same rule; where there are fewer
    of them than ranks, full TP keeps head ``r * h_kv // P`` on rank r and the exchange sends that one (the paper's
    KV replication in the send buffer).
    """

    layout: Layout
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        problem = self._problem(self.layout)
        if problem:
            raise LayoutError(f"{problem}; {self._advice()}")

    def _problem(self, layout: Layout) -> str | None:
        for what, n in (
            ("--tp-size", layout.world_size),
            ("the base TP degree (--tp-size / --sp-size)", layout.tp_size),
        ):
            if self.num_heads % n:
                return f"{self.num_heads} attention heads cannot be split over {what} = {n}"
            if self.num_kv_heads % n and n % self.num_kv_heads:
                return f"{self.num_kv_heads} KV heads can neither be split nor replicated over {what} = {n}"
        return None

    def _advice(self) -> str:
        world = self.layout.world_size
        fits = [sp for sp in divisors(world) if sp > 1 and not self._problem(Layout(world, sp))]
        if fits:
            return f"with --tp-size {world}, use --sp-size {_any_of(fits)}"
        smaller = [p for p in range(2, world) if not self._problem(Layout(p, p))]
        if smaller:
            return f"use --tp-size {smaller[-1]} --sp-size {smaller[-1]}"
        return "this model cannot run with Shift Parallelism; leave --sp-size out"

    @property
    def heads_per_rank(self) -> int:
        return self.num_heads // self.layout.world_size

    @property
    def kv_heads_per_rank(self) -> int:
        """KV heads in a rank's KV cache, in both configurations."""
        return max(1, self.num_kv_heads // self.layout.world_size)

    @property
    def base_kv_heads(self) -> int:
        """KV heads that a rank of the base model computes for its tokens."""
        return max(1, self.num_kv_heads // self.layout.tp_size)

    @property
    def kv_replication(self) -> int:
        """Ranks that keep a copy of the same KV head."""
        return max(1, self.layout.world_size // self.num_kv_heads)

    @property
    def kv_head_map(self) -> list[list[int]]:
        """For each SP rank, the KV heads (of a base rank's own ``base_kv_heads``) that it is sent."""
        sp, mine, each = self.layout.sp_size, self.base_kv_heads, self.kv_heads_per_rank
        return [[s * mine // sp + i for i in range(each)] for s in range(sp)]


def _any_of(values: list[int]) -> str:
    *head, last = [str(v) for v in values]
    return f"{', '.join(head)} or {last}" if head else last
