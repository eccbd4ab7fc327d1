"""The buffer shuffles of ``reference`` as Triton kernels: one launch and one pass over the bytes each.

All of them copy tiles of rows between places that differ in row stride. Elements are moved as integers of their size,
so every dtype of 1, 2, 4 or 8 bytes is moved bit by bit and nothing is compiled per dtype. Bytes of a call, with ``b``
the bytes of an element and ``n``, ``sp``, ``T`` as in ``reference``:

============== ====================================================== ======================================
kernel         reads                                                  writes
============== ====================================================== ======================================
pack_qkv       q, k and v: b * n * (q + k + v elements of a row)      the send buffer: b * sp * n * width
unpack_qkv     b * T * width                                          q, k and v: b * T * width
pack_output    b * T * width; nothing without padding (a view)        b * sp * n * width
unpack_output  b * sp * n * width                                     b * sp * n * width
============== ====================================================== ======================================

With KV replication a K or V head is read once and stored once for every rank that it is sent to.

Widths are compile-time constants: they belong to the model. The number of rows is an ordinary argument that Triton
does not specialise on: a batch of a new size compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

# dtypes of the same size: what is moved are bits
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Tile(NamedTuple):
    """What one program copies at a time, and the warps that do it."""

    rows: int = 16
    bytes: int = 512  # of a row
    warps: int = 4


TILE = Tile()


@triton.jit
def _copy_tile(
    source,
    source_stride,
    source_rows,
    target,
    target_stride,
    target_rows,
    copy_stride,
    first_row,
    first_column,
    WIDTH: tl.constexpr,
    COPIES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Copy a tile to COPIES places that are ``copy_stride`` apart; rows that the source does not have are zero.

    Offsets are in elements; those that grow with the rows are 64 bits wide.
    """
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    inside = (column < WIDTH)[None, :]
    far = row.to(tl.int64)[:, None]
    tile = tl.load(source + far * source_stride + column[None, :], mask=inside & (row < source_rows)[:, None], other=0)
    into = target + far * target_stride + column[None, :]
    mask = inside & (row < target_rows)[:, None]
    for copy in tl.static_range(COPIES):
        tl.store(into + copy * copy_stride, tile, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _pack_qkv(
    q,
    k,
    v,
    send,
    rows,
    q_stride,
    k_stride,
    v_stride,
    SP: tl.constexpr,
    COPIES: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program a tile of the input: the SP parts of q, then the SP/COPIES parts of k, then those of v."""
    width: tl.constexpr = Q_WIDTH + K_WIDTH + V_WIDTH
    q_chunks: tl.constexpr = (Q_WIDTH + COLUMNS - 1) // COLUMNS
    k_chunks: tl.constexpr = (K_WIDTH + COLUMNS - 1) // COLUMNS
    v_chunks: tl.constexpr = (V_WIDTH + COLUMNS - 1) // COLUMNS
    parts: tl.constexpr = SP // COPIES
    k_start: tl.constexpr = SP * q_chunks
    v_start: tl.constexpr = k_start + parts * k_chunks
    chunks: tl.constexpr = v_start + parts * v_chunks

    program = tl.program_id(0)
    row = program // chunks * ROWS
    chunk = program % chunks
    block = rows.to(tl.int64) * width  # elements for one rank
    if chunk < k_start:
        part = chunk // q_chunks
        _copy_tile(
            q + part * Q_WIDTH, q_stride, rows, send + part * block, width, rows, block,
            row, chunk % q_chunks * COLUMNS, Q_WIDTH, 1, ROWS, COLUMNS,
        )  # fmt: skip
    elif chunk < v_start:
        part = (chunk - k_start) // k_chunks
        _copy_tile(
            k + part * K_WIDTH, k_stride, rows, send + part * COPIES * block + Q_WIDTH, width, rows, block,
            row, (chunk - k_start) % k_chunks * COLUMNS, K_WIDTH, COPIES, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        part = (chunk - v_start) // v_chunks
        _copy_tile(
            v + part * V_WIDTH, v_stride, rows, send + part * COPIES * block + Q_WIDTH + K_WIDTH, width, rows, block,
            row, (chunk - v_start) % v_chunks * COLUMNS, V_WIDTH, COPIES, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _unpack_qkv(
    received,
    q,
    k,
    v,
    rows,
    Q_WIDTH: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program a tile of the output: q, then k, then v."""
    width: tl.constexpr = Q_WIDTH + K_WIDTH + V_WIDTH
    k_start: tl.constexpr = (Q_WIDTH + COLUMNS - 1) // COLUMNS
    v_start: tl.constexpr = k_start + (K_WIDTH + COLUMNS - 1) // COLUMNS
    chunks: tl.constexpr = v_start + (V_WIDTH + COLUMNS - 1) // COLUMNS

    program = tl.program_id(0)
    row = program // chunks * ROWS
    chunk = program % chunks
    if chunk < k_start:
        _copy_tile(
            received, width, rows, q, Q_WIDTH, rows, 0,
            row, chunk * COLUMNS, Q_WIDTH, 1, ROWS, COLUMNS,
        )  # fmt: skip
    elif chunk < v_start:
        _copy_tile(
            received + Q_WIDTH, width, rows, k, K_WIDTH, rows, 0,
            row, (chunk - k_start) * COLUMNS, K_WIDTH, 1, ROWS, COLUMNS,
        )  # fmt: skip
    else:
        _copy_tile(
            received + Q_WIDTH + K_WIDTH, width, rows, v, V_WIDTH, rows, 0,
            row, (chunk - v_start) * COLUMNS, V_WIDTH, 1, ROWS, COLUMNS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["source_rows", "target_rows"])
def _place_blocks(
    source,
    target,
    source_rows,
    target_rows,
    source_stride,
    BLOCKS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Put BLOCKS blocks [source_rows, WIDTH] side by side: [target_rows, BLOCKS * WIDTH], missing rows being zero."""
    block_chunks: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    chunks: tl.constexpr = BLOCKS * block_chunks

    program = tl.program_id(0)
    block = program % chunks // block_chunks
    _copy_tile(
        source + block * source_rows.to(tl.int64) * source_stride, source_stride, source_rows,
        target + block * WIDTH, BLOCKS * WIDTH, target_rows, 0,
        program // chunks * ROWS, program % block_chunks * COLUMNS, WIDTH, 1, ROWS, COLUMNS,
    )  # fmt: skip


class Launch(NamedTuple):
    """A kernel with everything that it is launched with, so that it can be compiled or launched."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, int]
    warps: int

    def run(self) -> None:
        if self.programs:  # an empty grid is an error in CUDA
            self.kernel[(self.programs,)](*self.arguments, **self.constants, num_warps=self.warps)


def pack_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sp_size: int,
    kv_head_map: Sequence[Sequence[int]],
    tile: Tile = TILE,
) -> torch.Tensor:
    """:func:`reference.pack_qkv`. The map must give the KV heads out evenly and in order, as ``HeadLayout`` does."""
    send, launch = plan_pack_qkv(q, k, v, sp_size, kv_head_map, tile)
    launch.run()
    return send


def plan_pack_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sp_size: int,
    kv_head_map: Sequence[Sequence[int]],
    tile: Tile = TILE,
) -> tuple[torch.Tensor, Launch]:
    n, heads, head_dim = q.shape
    each = len(kv_head_map[0])
    copies = max(1, sp_size * each // k.shape[1])  # ranks that a KV head is sent to
    even = [list(range(s // copies * each, (s // copies + 1) * each)) for s in range(sp_size)]
    if [list(part) for part in kv_head_map] != even or sp_size // copies * each != k.shape[1]:
        raise ValueError(
            f"kv_head_map {[list(part) for part in kv_head_map]} does not give {k.shape[1]} KV heads out evenly and in "
            f"order to {sp_size} SP ranks, all that this kernel can do; sgl_shift.layout.HeadLayout makes such maps"
        )
    widths = (heads // sp_size * head_dim, each * k.shape[2], each * v.shape[2])
    send = q.new_empty(sp_size, n, sum(widths))
    columns = _columns(q, widths, tile)
    chunks = [-(-width // columns) for width in widths]
    constants = {"SP": sp_size, "COPIES": copies, **_widths(widths), "ROWS": tile.rows, "COLUMNS": columns}
    programs = (sp_size * chunks[0] + sp_size // copies * (chunks[1] + chunks[2])) * -(-n // tile.rows)
    strides = (q.stride(0), k.stride(0), v.stride(0))
    return send, Launch(_pack_qkv, programs, (*_words(q, k, v, send), n, *strides), constants, tile.warps)


def unpack_qkv(
    received: torch.Tensor, num_tokens: int, q_width: int, k_width: int, v_width: int, tile: Tile = TILE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`reference.unpack_qkv`."""
    q, k, v, launch = plan_unpack_qkv(received, num_tokens, q_width, k_width, v_width, tile)
    launch.run()
    return q, k, v


def plan_unpack_qkv(
    received: torch.Tensor, num_tokens: int, q_width: int, k_width: int, v_width: int, tile: Tile = TILE
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Launch]:
    widths = (q_width, k_width, v_width)
    q, k, v = (received.new_empty(num_tokens, width) for width in widths)
    columns = _columns(received, widths, tile)
    constants = {**_widths(widths), "ROWS": tile.rows, "COLUMNS": columns}
    programs = sum(-(-width // columns) for width in widths) * -(-num_tokens // tile.rows)
    return q, k, v, Launch(_unpack_qkv, programs, (*_words(received, q, k, v), num_tokens), constants, tile.warps)


def pack_output(output: torch.Tensor, sp_size: int, rows: int, tile: Tile = TILE) -> torch.Tensor:
    """:func:`reference.pack_output`, always as a copy."""
    send, launch = plan_pack_output(output, sp_size, rows, tile)
    launch.run()
    return send


def plan_pack_output(output: torch.Tensor, sp_size: int, rows: int, tile: Tile = TILE) -> tuple[torch.Tensor, Launch]:
    num_tokens, width = output.shape
    send = output.new_empty(sp_size, rows, width)
    return send, _place(output, send, num_tokens, sp_size * rows, output.stride(0), 1, width, tile)


def unpack_output(received: torch.Tensor, tile: Tile = TILE) -> torch.Tensor:
    """:func:`reference.unpack_output`."""
    output, launch = plan_unpack_output(received, tile)
    launch.run()
    return output


def plan_unpack_output(received: torch.Tensor, tile: Tile = TILE) -> tuple[torch.Tensor, Launch]:
    sp_size, n, width = received.shape
    output = received.new_empty(n, sp_size * width)
    return output, _place(received, output, n, n, width, sp_size, width, tile)


def _place(
    source: torch.Tensor,
    target: torch.Tensor,
    source_rows: int,
    target_rows: int,
    source_stride: int,
    blocks: int,
    width: int,
    tile: Tile,
) -> Launch:
    columns = _columns(source, (width,), tile)
    constants = {"BLOCKS": blocks, "WIDTH": width, "ROWS": tile.rows, "COLUMNS": columns}
    programs = blocks * -(-width // columns) * -(-target_rows // tile.rows)
    arguments = (*_words(source, target), source_rows, target_rows, source_stride)
    return Launch(_place_blocks, programs, arguments, constants, tile.warps)


def _widths(widths: Sequence[int]) -> dict[str, int]:
    return dict(zip(("Q_WIDTH", "K_WIDTH", "V_WIDTH"), widths, strict=True))


def _columns(like: torch.Tensor, widths: Sequence[int], tile: Tile) -> int:
    """Columns of a tile: a power of two, no more than the widest part needs."""
    columns: int = min(tile.bytes // like.element_size(), triton.next_power_of_2(max(widths)))
    return columns


def _words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.view(WORDS[tensor.element_size()]) for tensor in tensors)
