"""The Ulysses exchange: "my tokens, many heads" for "all tokens, my heads", and back.

Two all-to-alls a layer, one carrying Q, K and V together and one the attention output (paper, Algorithm 1, steps 3 and
5). Knows nothing of attention: between the two, the caller runs whatever attention it likes on all tokens of its heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sgl_shift.layout import HeadLayout
from sgl_shift.stats import Stats
from sgl_shift_kernels import pack_output, pack_qkv, unpack_output, unpack_qkv


class Group(Protocol):
    """The collectives that Shift Parallelism needs of an SP group. Buffers are flat, contiguous and of equal splits."""

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None: ...

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None: ...


class CountedGroup:
    """An SP group that adds up the bytes that this rank sends to the others of it; what it keeps is not sent."""

    def __init__(self, group: Group, size: int, stats: Stats) -> None:
        self.group, self.size, self.stats = group, size, stats

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.stats.bytes_sent["all_to_all"] += input.nbytes // self.size * (self.size - 1)
        self.group.all_to_all(output, input)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        self.stats.bytes_sent["all_gather"] += input.nbytes * (self.size - 1)
        self.group.all_gather(output, input)


def scatter_heads(
    group: Group, heads: HeadLayout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From this rank's rows of all base heads to all ``num_tokens`` rows of this rank's own heads.

    Args:
        q: [n, heads of the base rank, head_dim], with n = rows a rank, padding included.
        k: [n, KV heads of the base rank, head_dim].
        v: [n, KV heads of the base rank, v_head_dim].

    Returns:
        q [T, heads/rank * head_dim], k [T, KV heads/rank * head_dim], v [T, KV heads/rank * v_head_dim]; contiguous,
        without padding, in the order of the batch: what the stock layer of the shift configuration is given.
    """
    sp_size = heads.layout.sp_size
    send = pack_qkv(q, k, v, sp_size, heads.kv_head_map)
    received = torch.empty_like(send)
    group.all_to_all(received.view(-1), send.view(-1))
    each = heads.kv_heads_per_rank
    return unpack_qkv(received, num_tokens, heads.heads_per_rank * q.shape[2], each * k.shape[2], each * v.shape[2])


def gather_heads(group: Group, heads: HeadLayout, output: torch.Tensor) -> torch.Tensor:
    """The way back: attention output [T, heads/rank * v_head_dim] to [n, heads of the base rank * v_head_dim]."""
    sp_size = heads.layout.sp_size
    send = pack_output(output, sp_size, heads.layout.rows_per_rank(output.shape[0]))
    received = torch.empty_like(send)
    group.all_to_all(received.view(-1), send.view(-1))
    return unpack_output(received)


def gather_rows(
    group: Group, hidden: torch.Tensor, num_tokens: int, sp_size: int, sp_rank: int, rows: Sequence[int] | None
) -> torch.Tensor:
    """Bring rows of the hidden states [n, d] of every SP rank together, at their place in the batch: [T, d].

    Args:
        rows: the rows of the batch that are needed, ascending; None for all. Rows that are not asked for are zero.

    One all-gather. With ``rows`` each rank sends as many rows as the rank that holds most of them.
    """
    n, width = hidden.shape
    if rows is None or len(rows) >= num_tokens:
        gathered = hidden.new_empty(sp_size * n, width)
        group.all_gather(gathered.view(-1), hidden.contiguous().view(-1))
        return gathered[:num_tokens]

    held: list[list[int]] = [[] for _ in range(sp_size)]
    for row in rows:
        held[row // n].append(row)
    most = max(len(part) for part in held)
    mine = [row - sp_rank * n for row in held[sp_rank]]
    send = hidden.new_zeros(most, width)
    send[: len(mine)] = hidden[_index(mine, hidden)]
    gathered = hidden.new_empty(sp_size * most, width)
    group.all_gather(gathered.view(-1), send.view(-1))
    sources = [s * most + i for s, part in enumerate(held) for i in range(len(part))]
    result = hidden.new_zeros(num_tokens, width)
    result[_index(rows, hidden)] = gathered[_index(sources, hidden)]
    return result


def _index(values: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.long).to(like.device, non_blocking=True)
