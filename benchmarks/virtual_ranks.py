"""Attention of P ranks played in turn on one device: what one configuration writes into the KV cache, the other reads.

Every rank has a paged KV cache of its own, filled through the base path (the real exchange, over an SP group whose
ranks take turns) or through TP, batch by batch: prefill, prefill behind a cached prefix, decode. After each batch the
output of all heads is compared with attention in float64, and two runs that take the configurations in opposite order
must leave the same bits in every cache and in every output. The attention is injected: FlashInfer's on a GPU
(``benchmarks.gpu_single``), :class:`TorchAttention` anywhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F

from sgl_shift.exchange import Group, gather_heads, scatter_heads
from sgl_shift.layout import HeadLayout, Layout
from sgl_shift.policy import Configuration

# Largest difference from float64 that rounding explains: outputs are of the order of 1 and rounded once to the dtype,
# and the probabilities once to it on tensor cores. Another head's output differs by 1 and more.
BOUND = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}

# New tokens of each request, batch by batch: prefill, prefill behind a prefix, two decodes, prefill, decode.
BATCHES = ((33, 7, 18), (5, 1, 90), (1, 1, 1), (1, 1, 1), (17, 40, 2), (1, 1, 1))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's attention on P ranks, its KV cache, and the dtypes of both."""

    world: int
    sp: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout(Layout(self.world, self.sp), self.heads, self.kv_heads)


class Pages(NamedTuple):
    """Where a batch's tokens lie in a paged KV cache, as FlashInfer's ``plan`` takes it: int32, on the CPU."""

    qo_indptr: torch.Tensor  # [requests + 1]: each request's new tokens
    kv_indptr: torch.Tensor  # [requests + 1]: each request's pages
    kv_indices: torch.Tensor  # [pages]
    last_page_len: torch.Tensor  # [requests]: tokens in the last page, new ones included
    page_size: int

    @property
    def is_decode(self) -> bool:
        return bool((self.qo_indptr.diff() == 1).all())


class Attention(Protocol):
    """Causal attention of new tokens on everything in a paged cache up to them. Planned per batch, run per rank."""

    def plan(self, pages: Pages, heads: int, kv_heads: int, head_dim: int, dtypes: tuple[torch.dtype, Any]) -> None:
        """``heads`` and ``kv_heads`` of one rank; ``dtypes`` of the queries and of the cache."""

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        """q [T, heads, head_dim] and caches [pages, page_size, kv_heads, head_dim] to [T, heads, head_dim]."""


class TorchAttention:
    """Paged attention in torch, in float64."""

    pages: Pages

    def plan(self, pages: Pages, heads: int, kv_heads: int, head_dim: int, dtypes: tuple[torch.dtype, Any]) -> None:
        self.pages = pages

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        outputs = []
        qo, kv = self.pages.qo_indptr.tolist(), self.pages.kv_indptr.tolist()
        for request, last in enumerate(self.pages.last_page_len.tolist()):
            held = self.pages.kv_indices[kv[request] : kv[request + 1]].long()
            length = (len(held) - 1) * self.pages.page_size + last
            k, v = (cache[held.to(cache.device)].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            outputs.append(attend(q[qo[request] : qo[request + 1]], k, v))
        return torch.cat(outputs).to(q.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention in float64: the last ``len(q)`` of ``len(k)`` tokens on those up to themselves."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[2])
    later = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).triu(len(k) - len(q) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), v)


T = TypeVar("T")


class _Member:
    """One rank of an SP group whose ranks take turns."""

    def __init__(self, sent: dict[int, torch.Tensor], size: int, rank: int) -> None:
        self.sent, self.size, self.rank = sent, size, rank

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        if len(self.sent) < self.size:
            self.sent[self.rank] = input.clone()
        else:
            output.copy_(torch.cat([self.sent[s].chunk(self.size)[self.rank] for s in range(self.size)]))

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        raise NotImplementedError("attention gathers nothing")


def in_turns(size: int, call: Callable[[Group, int], T]) -> list[T]:
    """``call(group, rank)`` for each rank of an SP group, with one all-to-all in it.

    Each is called twice: in the first round the collective only takes what is sent, in the second it delivers.
    """
    sent: dict[int, torch.Tensor] = {}
    members = [_Member(sent, size, rank) for rank in range(size)]
    for round_ in range(2):
        results = [call(member, rank) for rank, member in enumerate(members)]
        assert len(sent) == size, f"round {round_}: {len(sent)} of {size} ranks sent something"
    return results


class Ranks:
    """P ranks with a paged KV cache each, and requests that grow batch by batch."""

    def __init__(self, case: Case, attention: Attention, device: str, lengths: Sequence[int]) -> None:
        self.case, self.attention, self.layout = case, attention, case.layout
        needed = [-(-length // case.page_size) for length in lengths]
        shape = (sum(needed) + 1, case.page_size, self.layout.kv_heads_per_rank, case.head_dim)
        self.caches = [
            tuple(torch.zeros(shape, dtype=case.kv_dtype, device=device) for _ in "kv") for _ in range(case.world)
        ]
        # Pages of a request lie apart and out of order, the same on every rank.
        pages = torch.randperm(shape[0], generator=torch.Generator().manual_seed(3)).to(torch.int32)
        self.pages = pages[: sum(needed)].split(needed)
        self.lengths = [0] * len(lengths)

    def forward(
        self, configuration: Configuration, new: Sequence[int], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """One batch of ``new`` tokens a request: q [T, heads, d], k and v [T, kv_heads, d] to [T, heads * d]."""
        case, layout = self.case, self.layout
        self._grow(new, q.device)
        heads, kv_heads = layout.heads_per_rank, layout.kv_heads_per_rank
        self.attention.plan(self.batch, heads, kv_heads, case.head_dim, (case.dtype, case.kv_dtype))
        path = self._tp if configuration is Configuration.SHIFT else self._base
        return path(q, k, v)

    def _grow(self, new: Sequence[int], device: torch.device) -> None:
        size = self.case.page_size
        slots, indices = [], []
        for request, count in enumerate(new):
            at = torch.arange(self.lengths[request], self.lengths[request] + count)
            slots.append(self.pages[request][at // size].long() * size + at % size)
            self.lengths[request] += count
            indices.append(self.pages[request][: -(-self.lengths[request] // size)])
        last = [(length - 1) % size + 1 for length in self.lengths]
        self.slots = torch.cat(slots).to(device)
        counts = (new, [len(held) for held in indices])
        qo_indptr, kv_indptr = (F.pad(torch.tensor(c).cumsum(0), (1, 0)).to(torch.int32) for c in counts)
        last_page_len = torch.tensor(last, dtype=torch.int32)
        self.batch = Pages(qo_indptr, kv_indptr, torch.cat(indices), last_page_len, size)

    def _attend(self, rank: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """What a stock attention layer does on a rank: write the new KV to its slots, attend. [T, heads/P * d]."""
        for cache, values in zip(self.caches[rank], (k, v), strict=True):
            # as bytes: not every device can index fp8
            rows = cache.view(-1, *cache.shape[2:]).view(torch.uint8)
            rows[self.slots] = values.view(len(values), *cache.shape[2:]).to(cache.dtype).view(torch.uint8)
        return self.attention.run(q.view(len(q), -1, self.case.head_dim), *self.caches[rank]).flatten(1)

    def _tp(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        world, heads, kv_heads = self.case.world, self.layout.heads_per_rank, self.layout.kv_heads_per_rank
        outputs = []
        for rank in range(world):
            first = rank * self.case.kv_heads // world
            mine = (q[:, rank * heads : (rank + 1) * heads], *(t[:, first : first + kv_heads] for t in (k, v)))
            outputs.append(self._attend(rank, *(t.flatten(1).contiguous() for t in mine)))
        return torch.cat(outputs, 1)

    def _base(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        layout, tokens = self.layout.layout, len(q)
        heads, kv_heads = self.case.heads // layout.tp_size, self.layout.base_kv_heads
        columns = []
        for t in range(layout.tp_size):
            first = t * self.case.kv_heads // layout.tp_size
            own = (q[:, t * heads : (t + 1) * heads], *(x[:, first : first + kv_heads] for x in (k, v)))
            # one row of q, k and v after the other, padded: what a rank's QKV projection puts out
            fused = torch.cat([x.flatten(1) for x in own], 1)
            fused = F.pad(fused, (0, 0, 0, layout.rows_per_rank(tokens) * layout.sp_size - tokens))
            parts = fused.chunk(layout.sp_size)
            columns.append(self._sp_group(t, parts, tokens, heads, kv_heads))
        return torch.cat(columns, 1)

    def _sp_group(
        self, base_tp_rank: int, parts: Sequence[torch.Tensor], tokens: int, heads: int, kv_heads: int
    ) -> torch.Tensor:
        """The ranks of one SP group on their rows of the batch; the output's rows, [T, base heads * d]."""
        sp, dim = self.case.sp, self.case.head_dim

        def scatter(group: Group, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            q, k, v = parts[rank].split([heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
            q, k, v = (x.unflatten(1, (-1, dim)) for x in (q, k, v))
            return scatter_heads(group, self.layout, q, k, v, tokens)

        mine = in_turns(sp, scatter)
        outputs = [self._attend(base_tp_rank * sp + rank, *qkv) for rank, qkv in enumerate(mine)]
        home = in_turns(sp, lambda group, rank: gather_heads(group, self.layout, outputs[rank]))
        return torch.cat(home)[:tokens]


def check(case: Case, attention: Attention, device: str = "cpu") -> dict[str, Any]:
    """Both orders of the configurations over the same tokens.

    Returns:
        written_base and written_shift: the largest difference from float64 of the batches of each configuration;
        bound: what rounding explains; same_cache and same_output: whether both orders left the same bits; ok.
    """
    generator = torch.Generator().manual_seed(0)
    total = [sum(batch[request] for batch in BATCHES) for request in range(len(BATCHES[0]))]
    batches = []
    for new in BATCHES:
        q, k, v = (
            torch.randn(sum(new), n, case.head_dim, generator=generator).to(case.dtype).to(device)
            for n in (case.heads, case.kv_heads, case.kv_heads)
        )
        batches.append((new, q, k, v))
    expected = _expected(case, batches)

    errors = dict.fromkeys(Configuration, 0.0)
    runs: list[tuple[Ranks, list[torch.Tensor]]] = []
    for order in ((Configuration.BASE, Configuration.SHIFT), (Configuration.SHIFT, Configuration.BASE)):
        ranks, outputs = Ranks(case, attention, device, total), []
        for i, (batch, right) in enumerate(zip(batches, expected, strict=True)):
            outputs.append(ranks.forward(order[i % 2], *batch))
            error = (outputs[-1].double() - right).abs().max().item()
            errors[order[i % 2]] = max(errors[order[i % 2]], error if math.isfinite(error) else math.inf)
        runs.append((ranks, outputs))
    (one, out_one), (two, out_two) = runs
    caches = zip(one.caches, two.caches, strict=True)
    same_cache = all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for x, y in caches for a, b in zip(x, y, strict=True)
    )
    same_output = all(torch.equal(a, b) for a, b in zip(out_one, out_two, strict=True))
    bound = BOUND[case.dtype]
    return {
        "error_base": errors[Configuration.BASE],
        "error_shift": errors[Configuration.SHIFT],
        "bound": bound,
        "same_cache": same_cache,
        "same_output": same_output,
        "ok": max(errors.values()) <= bound and same_cache and same_output,
    }


def _expected(
    case: Case, batches: Sequence[tuple[Sequence[int], torch.Tensor, torch.Tensor, torch.Tensor]]
) -> list[torch.Tensor]:
    """Each batch's output [T, heads * d] in float64, of keys and values as a cache of ``kv_dtype`` holds them."""
    held: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in batches[0][0]]
    outputs = []
    for new, *qkv in batches:
        parts = []
        for request, (q, k, v) in enumerate(zip(*(t.split(list(new)) for t in qkv), strict=True)):
            held[request].append((k.to(case.kv_dtype).double(), v.to(case.kv_dtype).double()))
            keys, values = (torch.cat(list(x)) for x in zip(*held[request], strict=True))
            parts.append(attend(q, keys, values).flatten(1))
        outputs.append(torch.cat(parts))
    return outputs
