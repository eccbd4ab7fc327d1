"""One storage for the weights of both configurations.

Rank r = t * SP + s holds shard r of P of every weight in the shift configuration, and shard t of P/SP in the base one:
the shards of its SP group side by side. So the base weight is gathered from what the ranks have loaded, and the TP
weight becomes a view of it. Knows tensors and a group; ``sgl_shift_patches.weights`` knows which weight is cut how.

* Cut along rows (dimension 0): shards lie one after the other. Where a shard is itself fused of parts (Q, K and V; gate
  and up), this is not the order that SGLang's model of the base degree has, so the *output* of the base layer is
  re-ordered (:func:`natural_order`).
* Cut along columns: a shard is a strided view, which matrix products take.
* Replicated: one tensor for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from sgl_shift.exchange import Group


class Part(NamedTuple):
    """What a TP shard holds of one of several fused weights."""

    rows: int
    repeats: int = 1  # so many SP ranks in a row hold the same rows: KV heads fewer than ranks


class Cut(NamedTuple):
    """How the TP shards of a weight make up the base shard."""

    dim: int | None = None  # None: replicated
    parts: tuple[Part, ...] = ()  # of a fused weight
    copy: str = ""  # why the TP weight keeps memory of its own; empty: it is a view


class Holder(Protocol):
    """What holds a tensor: a parameter, or a place where one is to be found."""

    data: torch.Tensor


class SharedWeight:
    """One weight of both configurations.

    Args:
        tp, base: those of the two models. ``tp`` holds its values; ``base`` those that it was made with.
    """

    def __init__(self, cut: Cut, tp: Holder, base: Holder, sp_size: int, sp_rank: int) -> None:
        self.cut, self.tp, self.base, self.sp_size = cut, tp, base, sp_size
        shard = tp.data
        self._storage = base.data
        self._view = shard  # what the TP model is to have
        if cut.dim is None:
            base.data = shard
        elif not cut.copy and cut.dim == 0:
            # Repeated rows make the storage larger than the weight that the base model came with.
            fits = self._storage.numel() == sp_size * shard.numel() and self._storage.is_contiguous()
            storage = self._storage if fits else shard.new_empty(sp_size, *shard.shape)
            self._storage = storage.view(sp_size, *shard.shape)
            self._adopt(self._storage.flatten(0, 1), self._storage[sp_rank])
        elif not cut.copy:
            width = shard.shape[cut.dim]
            self._adopt(self._storage, self._storage.narrow(cut.dim, sp_rank * width, width))

    def _adopt(self, base: torch.Tensor, view: torch.Tensor) -> None:
        view.copy_(self.tp.data)
        self.base.data = base
        self.tp.data = self._view = view

    def gather(self, group: Group) -> None:
        """Bring the TP shards of all SP ranks into the base weight, in place; collective over the SP group."""
        cut, view = self.cut, self._view
        if self.tp.data.data_ptr() != view.data_ptr():  # an update has put another tensor there
            view.copy_(self.tp.data)
            self.tp.data = view
        if cut.dim is None:
            return
        if cut.dim == 0 and not cut.copy:
            group.all_gather(_bytes(self._storage), _bytes(view))  # the shard is where it goes
        else:
            self._storage.copy_(assemble(gathered(view, self.sp_size, group), cut))


def gathered(shard: torch.Tensor, sp_size: int, group: Group) -> torch.Tensor:
    """The shards [SP, ...] of all SP ranks; collective over the SP group."""
    shards = shard.new_empty(sp_size, *shard.shape)
    group.all_gather(_bytes(shards), _bytes(shard.contiguous()))
    return shards


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Collectives do not know every dtype (FP8)."""
    return tensor.view(-1).view(torch.uint8)


def assemble(shards: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The base weight, in the order of an SGLang model of that degree, of ``shards`` [SP, ...]."""
    assert cut.dim is not None
    if not cut.parts:
        return torch.cat(list(shards), cut.dim)
    pieces = shards.split([part.rows for part in cut.parts], cut.dim + 1)
    return torch.cat(
        [shard for piece, part in zip(pieces, cut.parts, strict=True) for shard in piece[:: part.repeats]], cut.dim
    )


def natural_order(output: torch.Tensor, parts: Sequence[Part], sp_size: int) -> torch.Tensor:
    """Re-order the output [..., SP * sum of rows] of a layer whose fused weight lies shard by shard.

    Returns:
        [..., all of part 0 | all of part 1 | ...], what a layer of the base degree puts out; repeated rows once.
    """
    shards = output.unflatten(-1, (sp_size, -1))
    kept = [part.rows * (sp_size // part.repeats) for part in parts]
    result = output.new_empty(*output.shape[:-1], sum(kept))
    pieces = shards.split([part.rows for part in parts], -1)
    for into, piece, part in zip(result.split(kept, -1), pieces, parts, strict=True):
        into.unflatten(-1, (-1, part.rows)).copy_(piece[..., :: part.repeats, :])
    return result
