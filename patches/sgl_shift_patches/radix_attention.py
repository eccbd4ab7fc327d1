"""RadixAttention of the base model: the exchange around the stock layer of the same place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from sgl_shift.forward import ShiftParallel


class AttentionCallError(RuntimeError):
    """A model called its attention in a way that the exchange was not written for."""


# Keyword arguments of an attention call that hold one value a head and are attributes of the module that calls: the
# stock module's own are passed on, which belong to the heads that attention runs on. gpt_oss, granite: attention sinks.
PER_HEAD = frozenset({"sinks"})


class Layer(NamedTuple):
    """One attention layer of a decoder stack and the module that calls it."""

    attention: Any
    owner: nn.Module


def pair(base: nn.Module, stock: nn.Module) -> list[tuple[Layer, Layer]]:
    """The attention layers of both decoder stacks, matched by module path and layer id.

    Raises:
        AttentionCallError: the two do not match; only possible with an architecture that was not tested.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    def layers(model: nn.Module) -> dict[tuple[str, int], Layer]:
        return {
            (path, module.layer_id): Layer(module, model.get_submodule(path.rpartition(".")[0]))
            for path, module in model.named_modules()
            if isinstance(module, RadixAttention)
        }

    ours, theirs = layers(base), layers(stock)
    if not ours or ours.keys() != theirs.keys():
        raise AttentionCallError(f"attention layers of the two configurations differ: {ours.keys() ^ theirs.keys()}")
    return [(ours[key], theirs[key]) for key in ours]


def exchange_around(shift: ShiftParallel, base: Layer, stock: Layer) -> Callable[..., torch.Tensor]:
    """``forward`` for one attention layer of the base model.

    The stock layer object runs the attention: heads, scales, window and layer id are then those that the backend, the
    KV pool and everything built on it know, with the metadata of the whole batch.
    """
    layer = base.attention

    def forward(
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> torch.Tensor:
        unknown = [name for name, value in extra.items() if not _is_per_head(name, value, base, stock)]
        if k is None or v is None or not save_kv_cache or unknown:
            raise AttentionCallError(
                f"layer {layer.layer_id} calls attention with k={'None' if k is None else 'given'}, "
                f"v={'None' if v is None else 'given'}, save_kv_cache={save_kv_cache}, unknown arguments {unknown}: "
                "Shift Parallelism can exchange q, k and v that attention itself caches. Serve this model with "
                "--shift-mode tp, or leave out --sp-size"
            )
        stock_extra = {name: getattr(stock.owner, name) for name in extra}
        return shift.attend(
            lambda q, k, v: stock.attention(q, k, v, forward_batch, save_kv_cache, **stock_extra),
            q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim),
        )

    return forward


def _is_per_head(name: str, value: Any, base: Layer, stock: Layer) -> bool:
    """Whether an extra argument is the calling module's own attribute, so that the stock module has its counterpart."""
    return name in PER_HEAD and getattr(base.owner, name, None) is value and hasattr(stock.owner, name)
