"""RadixAttention of the base model: the exchange around the stock layer of the same place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sgl_shift.forward import ShiftParallel


class AttentionCallError(RuntimeError):
    """A model called its attention in a way that the exchange was not written for."""


def pair(base: nn.Module, stock: nn.Module) -> list[tuple[Any, Any]]:
    """The attention layers of both decoder stacks, matched by module path and layer id.

    Raises:
        AttentionCallError: the two do not match; only possible with an architecture that was not tested.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    def layers(model: nn.Module) -> dict[tuple[str, int], Any]:
        return {(path, m.layer_id): m for path, m in model.named_modules() if isinstance(m, RadixAttention)}

    ours, theirs = layers(base), layers(stock)
    if not ours or ours.keys() != theirs.keys():
        raise AttentionCallError(f"attention layers of the two configurations differ: {ours.keys() ^ theirs.keys()}")
    return [(ours[key], theirs[key]) for key in ours]


def exchange_around(shift: ShiftParallel, base_layer: Any, stock_layer: Any) -> Callable[..., torch.Tensor]:
    """``forward`` for one attention layer of the base model.

    The stock layer object runs the attention: heads, scales, window and layer id are then those that the backend, the
    KV pool and everything built on it know, with the metadata of the whole batch.
    """

    def forward(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> torch.Tensor:
        if k is None or v is None or not save_kv_cache or extra:
            raise AttentionCallError(
                f"layer {stock_layer.layer_id} calls attention with k={'None' if k is None else 'given'}, "
                f"save_kv_cache={save_kv_cache}, {sorted(extra)}; Shift Parallelism can exchange q, k, v only. "
                "Serve this model with --shift-mode tp, or leave out --sp-size"
            )
        return shift.attend(
            lambda q, k, v: stock_layer(q, k, v, forward_batch, save_kv_cache),
            q.reshape(-1, base_layer.tp_q_head_num, base_layer.qk_head_dim),
            k.reshape(-1, base_layer.tp_k_head_num, base_layer.qk_head_dim),
            v.reshape(-1, base_layer.tp_v_head_num, base_layer.v_head_dim),
        )

    return forward
