"""How much memory the weights of the two configurations take."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from torch import nn


def weight_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all parameters and buffers of ``modules``; storage that is shared is counted once."""
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    storages = {(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
