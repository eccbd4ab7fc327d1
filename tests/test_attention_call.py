"""The guard in the attention hook: what the exchange was not written for fails loudly at its first batch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sgl_shift_patches.radix_attention import AttentionCallError, Layer, exchange_around
from tests import parity
from tests.checkpoints import MOE
from tests.parity import Requests


class Owner(nn.Module):
    def __init__(self, sinks: torch.Tensor | None = None) -> None:
        super().__init__()
        if sinks is not None:
            self.sinks = sinks


class Recorder:
    """In the place of a rank's state, where it runs attention, and of the stock layer, where it keeps the call."""

    def attend(self, attention, q, k, v):
        self.shapes = (q.shape, k.shape, v.shape)
        return attention(q, k, v)

    def __call__(self, q, k, v, forward_batch, save_kv_cache, **extra):
        self.extra = extra
        return q


def make(base_owner: nn.Module, stock_owner: nn.Module):
    recorder = Recorder()
    layer = SimpleNamespace(tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, qk_head_dim=8, v_head_dim=8, layer_id=0)
    return recorder, exchange_around(recorder, Layer(layer, base_owner), Layer(recorder, stock_owner))


Q, KV = torch.zeros(3, 32), torch.zeros(3, 16)


def test_rows_are_counted_by_the_heads_whatever_the_shape():
    recorder, forward = make(Owner(), Owner())
    for q in (Q, Q.view(3, 4, 8), Q.view(1, 3, 32)):
        forward(q, KV, KV, None)
        assert recorder.shapes == ((3, 4, 8), (3, 2, 8), (3, 2, 8))


@pytest.mark.parametrize(
    ("k", "v", "options", "says"),
    [
        (None, None, {}, "k=None"),
        (KV, None, {}, "v=None"),
        (KV, KV, {"save_kv_cache": False}, "save_kv_cache=False"),
        (KV, KV, {"k_rope": KV}, r"unknown arguments \['k_rope'\]"),
        (KV, KV, {"sinks": torch.zeros(4)}, r"unknown arguments \['sinks'\]"),  # not the module's own
    ],
)
def test_a_call_that_it_was_not_written_for_is_an_error(k, v, options, says):
    _, forward = make(Owner(torch.ones(4)), Owner(torch.ones(2)))
    with pytest.raises(AttentionCallError, match=says):
        forward(Q, k, v, None, **options)


def test_sinks_are_those_of_the_heads_that_attention_runs_on():
    base, stock = Owner(torch.ones(4)), Owner(torch.full((2,), 7.0))
    recorder, forward = make(base, stock)
    forward(Q, KV, KV, None, sinks=base.sinks)
    assert recorder.extra["sinks"] is stock.sinks


def kv_written_with_rope(_rank: int) -> None:
    """The CUDA path of Qwen3-MoE and gpt-oss, with torch in the place of the kernel that rotates and writes KV."""
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.models import utils

    rotate = RotaryEmbedding.forward_native

    def rotate_and_write(self, positions, query, key, offsets=None, fused_set_kv_buffer_arg=None):
        query, key = rotate(self, positions, query, key, offsets)
        if (into := fused_set_kv_buffer_arg) is not None:
            into.k_buffer[into.cache_loc] = key.to(into.k_buffer.dtype)
            into.v_buffer[into.cache_loc] = into.value.to(into.v_buffer.dtype)
        return query, key

    RotaryEmbedding.forward_native = rotate_and_write
    utils._is_cuda = True
    utils.FusedSetKVBufferArg = SimpleNamespace


def test_kv_is_written_by_attention_in_base_batches_only(start):
    """Where stock writes KV outside of attention, base must not, and stock batches go on doing so.

    KV is rounded to bfloat16, which may turn the last digit of a float32 into a step of 1/256.
    """
    requests = Requests.random(9, [30, 7], [3, 5])
    engine = {"kv_cache_dtype": "bfloat16", "in_rank": kv_written_with_rope}
    expected = parity.run(start(MOE, 2, plugin=False, **engine), requests)
    host = start(MOE, 2, sp_size=2, shift_mode="sp", **engine)
    assert parity.worst_difference(expected, parity.run(host, requests)) < 0.02
    host.set(mode="shift", threshold=5)
    host.flush_cache()
    assert parity.worst_difference(expected, parity.run(host, requests)) < 0.02
    tokens = host.info()["tokens"]
    assert tokens["base"] > 0
    assert tokens["shift"] > 0
