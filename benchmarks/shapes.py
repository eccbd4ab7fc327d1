"""Attention of models that the kernels are compiled for and measured with."""

from __future__ import annotations

import dataclasses

import torch

from sgl_shift.layout import HeadLayout, Layout
from sgl_shift_kernels.triton_kernels import (
    TILE,
    Launch,
    Tile,
    plan_pack_output,
    plan_pack_qkv,
    plan_unpack_output,
    plan_unpack_qkv,
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Attention of a model on ``world`` ranks with SP degree ``sp``."""

    name: str
    world: int
    sp: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout(Layout(self.world, self.sp), self.heads, self.kv_heads)

    @property
    def qkv_width(self) -> int:
        """Elements of a row of a base rank's fused QKV output."""
        return (self.heads // self.layout.layout.tp_size + 2 * self.layout.base_kv_heads) * self.head_dim

    @property
    def widths(self) -> tuple[int, int, int]:
        """Elements of a row of q, k and v behind the exchange."""
        kv = self.layout.kv_heads_per_rank * self.head_dim
        return self.layout.heads_per_rank * self.head_dim, kv, kv

    def qkv(self, rows: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        """q, k and v [rows, heads, head_dim] of a base rank: slices of one tensor of random bits."""
        size = (rows, self.qkv_width * self.dtype.itemsize)
        fused = torch.randint(256, size, dtype=torch.uint8, device=device).view(self.dtype)
        kv = self.layout.base_kv_heads * self.head_dim
        parts = fused.split([self.qkv_width - 2 * kv, kv, kv], dim=1)
        return tuple(part.unflatten(1, (-1, self.head_dim)) for part in parts)

    def launches(self, rows: int, device: str = "cpu", tile: Tile = TILE) -> dict[str, tuple[Launch, int]]:
        """Each kernel with the arguments that a batch of ``sp * rows - 1`` tokens gives it (the output is padded).

        Returns:
            for each kernel what can be launched or compiled, and the bytes that it reads and writes together.
        """
        q, k, v = self.qkv(rows, device)
        tokens, width, size = self.sp * rows - 1, sum(self.widths), self.dtype.itemsize
        send, pack_qkv = plan_pack_qkv(q, k, v, self.sp, self.layout.kv_head_map, tile)
        query, _, _, unpack_qkv = plan_unpack_qkv(send, tokens, *self.widths, tile)
        back, pack_output = plan_pack_output(query, self.sp, rows, tile)
        _, unpack_output = plan_unpack_output(back, tile)
        return {
            "pack_qkv": (pack_qkv, size * (rows * self.qkv_width + self.sp * rows * width)),
            "unpack_qkv": (unpack_qkv, size * 2 * tokens * width),
            "pack_output": (pack_output, size * (tokens + self.sp * rows) * self.widths[0]),
            "unpack_output": (unpack_output, size * 2 * self.sp * rows * self.widths[0]),
        }


LLAMA = Shape("Llama-3.3-70B, P=8 SP=8", 8, 8, 64, 8, 128, torch.bfloat16)
QWEN = Shape("Qwen3-30B-A3B, P=8 SP=8, KV heads replicated", 8, 8, 32, 4, 128, torch.bfloat16)
LLAMA_FP8 = Shape("Llama-3.3-70B, P=8 SP=4, fp8", 8, 4, 64, 8, 128, torch.float8_e4m3fn)
LLAMA_FP32 = Shape("Llama-3.3-70B, P=8 SP=8, float32", 8, 8, 64, 8, 128, torch.float32)
ODD = Shape("odd: P=4 SP=4, 4 heads of 5, one KV head", 4, 4, 4, 1, 5, torch.bfloat16)
