"""How much memory the weights of the two configurations take."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import nn  # not at run time: the planner reads this module and starts without torch


def weight_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all parameters and buffers of ``modules``; storage that is shared is counted once."""
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    storages = {(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class Checkpoint(NamedTuple):
    """Bytes of a checkpoint as it is loaded."""

    total: int
    stack: int  # without the LM head, which the base configuration has none of
    experts: int = 0  # their part of the stack
    columns: int = 0  # layers outside of experts that are cut along their columns
    dtypes: frozenset[str] = frozenset()  # of quantized weights

    @classmethod
    def in_folder(cls, folder: Path, itemsize: int) -> Checkpoint | None:
        """From the headers of the ``*.safetensors`` in ``folder``; None if there are none.

        Args:
            itemsize: of the dtype that unquantized weights are loaded in, in bytes.
        """
        total = head = experts = columns = 0
        dtypes = set()
        for file in folder.glob("*.safetensors"):
            with file.open("rb") as content:
                header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
            for name, tensor in header.items():
                if name == "__metadata__":
                    continue
                begin, end = tensor["data_offsets"]
                plain = tensor["dtype"] in ("F64", "F32", "F16", "BF16")
                size = math.prod(tensor["shape"]) * itemsize if plain else end - begin
                total += size
                head += size if name.startswith("lm_head.") else 0
                experts += size if ".experts." in name else 0
                columns += size if re.search(r"\.(o_proj|down_proj)\.", name) and ".experts." not in name else 0
                dtypes |= set() if plain else {tensor["dtype"]}
        return cls(total, total - head, experts, columns, frozenset(dtypes)) if total else None

    def together(self, world_size: int, tp_size: int, *, gpu: bool) -> float:
        """About what a rank holds of both configurations, in bytes (docs/weights.md)."""
        stock, base = self.total / world_size, self.stack / tp_size
        if not self.dtypes <= {"F8_E4M3"}:
            return base + stock
        copies = self.experts if gpu or self.dtypes else self.experts * 2 // 3  # w13 is two thirds
        copies += self.columns if self.dtypes else 0
        return base + (self.total - self.stack + copies) / world_size
