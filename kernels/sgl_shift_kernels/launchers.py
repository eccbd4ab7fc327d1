"""What the exchange calls: arguments are checked, then Triton serves on CUDA and the torch reference elsewhere.

Nothing here waits for the device or reads from it, and shapes follow from the arguments' shapes alone: every call can
be captured in a CUDA graph. What each function does, and the layout of the buffers, is said in ``reference``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sgl_shift_kernels import reference


def pack_qkv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sp_size: int, kv_head_map: Sequence[Sequence[int]]
) -> torch.Tensor:
    """:func:`reference.pack_qkv`: q [n, heads, head_dim], k and v [n, kv_heads, ...] to contiguous [sp, n, width].

    The three are usually slices of one fused QKV output: rows may be any distance apart, a row's heads must be
    adjacent. On CUDA one kernel reads each element of q, k and v once and writes each of the buffer once.

    Raises:
        ValueError: shapes, strides, dtypes, devices or the map are not those above.
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _need(tensor.dim() == 3, f"{name} must be [n, heads, head_dim], not {list(tensor.shape)}")
        _need(tensor.shape[0] == q.shape[0], f"{name} has {tensor.shape[0]} rows, q {q.shape[0]}: they must be equal")
        _need(tensor.dtype == q.dtype, f"{name} is {tensor.dtype}, q {q.dtype}: they must be equal")
        _need(tensor.device == q.device, f"{name} is on {tensor.device}, q on {q.device}: they must be on one device")
        _need(
            rows_are_contiguous(tensor),
            f"the heads of a row of {name} must be adjacent: strides {tensor.stride()} of shape {list(tensor.shape)}; "
            f"pass {name}.contiguous()",
        )
    _need(
        sp_size > 0 and q.shape[1] % sp_size == 0, f"{q.shape[1]} query heads cannot be split over {sp_size} SP ranks"
    )
    _need(k.shape[1] == v.shape[1], f"k has {k.shape[1]} heads and v {v.shape[1]}: they must be equal")
    each = len(kv_head_map[0]) if len(kv_head_map) else 0
    right = all(
        len(heads) == each
        and list(heads) == list(range(heads[0], heads[0] + each))
        and 0 <= heads[0] <= k.shape[1] - each
        for heads in kv_head_map
    )
    _need(
        len(kv_head_map) == sp_size and each > 0 and right,
        f"kv_head_map {[list(heads) for heads in kv_head_map]} must name for each of {sp_size} SP ranks equally many "
        f"neighbouring KV heads of the {k.shape[1]}",
    )
    return _implementation(q).pack_qkv(q, k, v, sp_size, kv_head_map)


def unpack_qkv(
    received: torch.Tensor, num_tokens: int, q_width: int, k_width: int, v_width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`reference.unpack_qkv`: contiguous [sp, n, width] to contiguous q, k and v, [num_tokens, ...] each.

    On CUDA one kernel; rows behind ``num_tokens`` are not read.

    Raises:
        ValueError: shapes or strides are not those above.
    """
    _need_blocks(received)
    widths = (q_width, k_width, v_width)
    _need(
        min(widths) > 0 and sum(widths) == received.shape[2],
        f"widths {widths} must be positive and add up to {received.shape[2]}, the width of what was received",
    )
    rows = received.shape[0] * received.shape[1]
    _need(0 <= num_tokens <= rows, f"{num_tokens} tokens do not lie in the {rows} rows received")
    q, k, v = _implementation(received).unpack_qkv(received, num_tokens, *widths)
    return q, k, v


def pack_output(output: torch.Tensor, sp_size: int, rows: int) -> torch.Tensor:
    """:func:`reference.pack_output`: [T, width], rows any distance apart, to contiguous [sp, rows, width].

    Without padding and with contiguous rows this is a view. Otherwise, on CUDA, one kernel copies and pads.

    Raises:
        ValueError: shapes or strides are not those above.
    """
    _need(output.dim() == 2, f"output must be [tokens, width], not {list(output.shape)}")
    _need(
        rows_are_contiguous(output),
        f"a row of output must be contiguous: strides {output.stride()}; pass .contiguous()",
    )
    _need(
        sp_size > 0 and rows >= 0 and output.shape[0] <= sp_size * rows,
        f"{output.shape[0]} tokens do not fit in {sp_size} x {rows} rows",
    )
    if output.shape[0] == sp_size * rows and output.is_contiguous():
        return output.view(sp_size, rows, output.shape[1])
    return _implementation(output).pack_output(output, sp_size, rows)


def unpack_output(received: torch.Tensor) -> torch.Tensor:
    """:func:`reference.unpack_output`: contiguous [sp, n, width] to contiguous [n, sp * width]; one kernel on CUDA.

    Raises:
        ValueError: ``received`` is not contiguous or not of three dimensions.
    """
    _need_blocks(received)
    return _implementation(received).unpack_output(received)


def rows_are_contiguous(tensor: torch.Tensor) -> bool:
    """Whether each row of ``tensor``, everything behind the first dimension, lies in memory without a gap."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _need_blocks(received: torch.Tensor) -> None:
    _need(received.dim() == 3, f"a received buffer must be [sp, n, width], not {list(received.shape)}")
    _need(received.is_contiguous(), f"a received buffer must be contiguous: strides {received.stride()}")


def _need(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _implementation(tensor: torch.Tensor) -> Any:
    if not tensor.is_cuda:
        return reference
    device, current = tensor.get_device(), torch.cuda.current_device()
    _need(
        device == current,
        f"the tensors are on cuda:{device} and kernels are launched on the current device, cuda:{current}; "
        f"call torch.cuda.set_device({device}) first",
    )
    from sgl_shift_kernels import triton_kernels  # a CPU needs no Triton

    return triton_kernels
