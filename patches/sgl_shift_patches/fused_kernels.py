"""Fused kernels that know nothing of the exchange: off in base batches, untouched in stock ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_shift_patches import state


def _off_in_base(original: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
    shift = state.current()
    if shift is not None and shift.in_base:
        return False
    return original(*args, **kwargs)


# models/utils.py: RoPE and the KV write in one kernel, before RadixAttention. In a base batch it would write this
# rank's tokens of all base heads where all tokens of its own heads belong.
enable_fused_set_kv_buffer = _off_in_base

# layers/layer_boundary: all-reduce and RMSNorm in one kernel over a process-wide workspace of the stock TP group
# (layers/flashinfer_comm_fusion.py). Another group would free and re-create the workspace under captured graphs.
flashinfer_ar_fusion_applies = _off_in_base
