"""The check that ``benchmarks.gpu_single`` makes of FlashInfer on one GPU, here with attention in torch."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.virtual_ranks import Case, Ranks, TorchAttention, check
from sgl_shift.layout import HeadLayout

CASE = Case(8, 4, 16, 4, 16, 16, torch.float32, torch.float32)  # each KV head on two ranks
CASES = [
    CASE,
    dataclasses.replace(CASE, page_size=1, dtype=torch.bfloat16, kv_dtype=torch.bfloat16),
    dataclasses.replace(CASE, world=4, sp=2, heads=4, kv_heads=4, kv_dtype=torch.float8_e4m3fn),
    dataclasses.replace(CASE, sp=8, kv_heads=1, page_size=1, dtype=torch.bfloat16, kv_dtype=torch.float8_e5m2),
    dataclasses.replace(CASE, world=2, sp=2, kv_heads=8),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_one_configuration_writes_the_other_reads(case):
    result = check(case, TorchAttention())
    assert result["ok"], result


def broken(case: Case) -> dict:
    result = check(case, TorchAttention())
    assert not result["ok"]
    return result


def test_the_wrong_kv_head_is_noticed(monkeypatch):
    right = HeadLayout.kv_head_map.fget
    monkeypatch.setattr(HeadLayout, "kv_head_map", property(lambda self: right(self)[1:] + right(self)[:1]))
    result = broken(CASE)
    assert result["error_base"] > 0.5
    assert not result["same_cache"]


def test_the_wrong_slot_is_noticed(monkeypatch):
    grow = Ranks._grow

    def off_by_one(self, new, device):
        grow(self, new, device)
        self.slots[-1] = self.slots[0]

    monkeypatch.setattr(Ranks, "_grow", off_by_one)
    assert max(broken(CASE)[name] for name in ("error_base", "error_shift")) > 0.05


def test_tokens_in_another_order_are_noticed(monkeypatch):
    from benchmarks import virtual_ranks

    scatter = virtual_ranks.scatter_heads

    def shifted(*args):
        return tuple(part.roll(1, 0) for part in scatter(*args))

    monkeypatch.setattr(virtual_ranks, "scatter_heads", shifted)
    assert broken(CASE)["error_base"] > 0.5


def test_attention_that_reads_another_page_is_noticed():
    class Elsewhere(TorchAttention):
        def run(self, q, k_cache, v_cache):
            return super().run(q, k_cache, v_cache.roll(1, 0))

    assert check(CASE, Elsewhere())["error_shift"] > 0.5
