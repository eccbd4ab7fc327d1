"""The benchmark for one GPU, as far as it runs without one: everything but its clock, FlashInfer and CUDA itself."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from benchmarks import gpu_single
from benchmarks.shapes import Shape
from benchmarks.virtual_ranks import Case, Pages, TorchAttention, check
from sgl_shift_kernels import triton_kernels
from sgl_shift_kernels.triton_kernels import Tile
from tests.interpreter import interpreted_kernels

SHAPE = Shape("small", 4, 4, 8, 2, 8, torch.bfloat16)
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the benchmark itself")


def wall(calls: Any) -> float:
    started = time.perf_counter()
    calls[0]()
    return time.perf_counter() - started


def test_a_row_per_kernel_and_size(monkeypatch):
    monkeypatch.setattr(gpu_single, "_sets", lambda size: 2)
    with interpreted_kernels():
        rows = list(gpu_single.kernels(wall, "cpu", [SHAPE], [1024, 2048]))
        tiles = list(gpu_single.tiles(wall, "cpu", SHAPE, 512, [Tile(4, 32), Tile(2, 64)]))
    assert [row["kernel"] for row in rows] == ["pack_qkv", "unpack_qkv", "pack_output", "unpack_output"] * 2
    assert all(row["right"] is True for row in rows)
    # 4 rows for each of 4 ranks of 2 query heads and 2 KV heads of 8; what is read has each KV head once
    assert [row["bytes"] for row in rows[:4]] == [
        2 * (4 * 12 * 8 + 16 * 4 * 8),
        2 * 2 * 15 * 4 * 8,
        2 * (15 + 16) * 2 * 8,
        2 * 2 * 16 * 2 * 8,
    ]
    assert len(tiles) == 6
    text = gpu_single.table(rows)
    assert text.count("\n") == 10
    assert json.dumps(rows)
    assert not gpu_single.verdicts({"kernels": rows})["wrong"]


def test_a_kernel_that_is_wrong_is_reported(monkeypatch):
    monkeypatch.setattr(gpu_single, "_sets", lambda size: 2)
    right = triton_kernels.unpack_output
    monkeypatch.setattr(triton_kernels, "unpack_output", lambda received: right(received.flip(0)))
    with interpreted_kernels():
        rows = list(gpu_single.kernels(wall, "cpu", [SHAPE], [512]))
    assert [row["kernel"] for row in gpu_single.verdicts({"kernels": rows})["wrong"]] == ["unpack_output"]


def test_what_misses_its_aim_is_listed():
    row = {"kernel": "pack_qkv", "right": True, "bytes": 1 << 29, "times a copy": 1.16}
    slow = {**row, "times a copy": 1.2}
    small = {**slow, "bytes": 1 << 28}
    found = gpu_single.verdicts({"kernels": [{**row, "times a copy": 1.1}, row, slow, small]})
    assert found == {
        "wrong": [],
        "slower than 1.15 times a copy": [row, slow, small],
        "below 0.85 of copy bandwidth from 256 MB": [slow],
    }


def test_strided_weights_are_slices_that_gemms_take_as_they_are():
    rows = list(gpu_single.gemms(wall, "cpu", {"o_proj": (24, 32)}, 4, (1, 5), torch.float32))
    assert [(row["rows"], row["weight"]) for row in rows] == [(1, "24 x 8"), (5, "24 x 8")]
    assert all(row["difference"] < 1e-4 for row in rows)


class Recorded(TorchAttention):
    """A FlashInfer wrapper whose arguments are bound to the signatures of the real one, and that torch answers for."""

    real: Any
    plan_of: str

    def __init__(self, *args: Any, **more: Any) -> None:
        arguments = inspect.signature(self.real.__init__).bind(self, *args, **more).arguments
        assert arguments["kv_layout"] == "NHD"
        assert arguments["float_workspace_buffer"].count_nonzero() == 0
        self.tensor_cores = arguments.get("use_tensor_cores")

    def plan(self, *args: Any, **more: Any) -> None:
        bound = inspect.signature(getattr(self.real, self.plan_of)).bind(self, *args, **more)
        self.about = about = bound.arguments
        decode = self.tensor_cores is not None
        prefix = "" if decode else "paged_kv_"
        indptr, indices, last = (about[prefix + name] for name in ("indptr", "indices", "last_page_len"))
        qo_indptr = torch.arange(len(indptr), dtype=torch.int32) if decode else about["qo_indptr"]
        for tensor in (qo_indptr, indptr, indices, last):
            assert tensor.dtype == torch.int32
        assert decode or about["causal"] is True
        super().plan(Pages(qo_indptr, indptr, indices, last, about["page_size"]), 0, 0, 0, (torch.float, None))

    def run(self, *args: Any, **more: Any) -> torch.Tensor:
        bound = inspect.signature(self.real.run).bind(self, *args, **more).arguments
        q, (k, v), about = bound["q"], bound["paged_kv_cache"], self.about
        dim = about.get("head_dim", about.get("head_dim_qk"))
        assert q.shape == (self.pages.qo_indptr[-1], about["num_qo_heads"], dim)
        assert k.shape[1:] == v.shape[1:] == (about["page_size"], about["num_kv_heads"], dim)
        assert (q.dtype, k.dtype) == (about["q_data_type"], about["kv_data_type"])
        assert about["sm_scale"] == pytest.approx(dim**-0.5)
        return super().run(q, k, v)


def test_flashinfer_is_called_by_its_signatures(monkeypatch):
    flashinfer = pytest.importorskip("flashinfer")
    for name, plan_of in (
        ("BatchPrefillWithPagedKVCacheWrapper", "plan"),
        ("BatchDecodeWithPagedKVCacheWrapper", "_plan_impl"),  # plan hands its keywords on to it
    ):
        real = getattr(flashinfer, name)
        monkeypatch.setattr(flashinfer, name, type(name, (Recorded,), {"real": real, "plan_of": plan_of}))
    attention = gpu_single.FlashInferAttention("cpu")
    used = set()
    for case in (dataclasses.replace(case, head_dim=16) for case in gpu_single.cases()[::3]):
        result = check(case, attention)
        assert result["ok"], (case, result)
        used.add(attention.planned.tensor_cores)
    assert used == {False, True}
    gpu_single.compile_flashinfer(attention)


def test_a_case_that_fails_leaves_the_others():
    class Refusing(TorchAttention):
        def plan(self, pages: Pages, heads: int, *rest: Any) -> None:
            if heads == 2:
                raise ValueError("no kernel")
            super().plan(pages, heads, *rest)

    small = Case(2, 2, 4, 2, 4, 1, torch.float32, torch.float32)
    rows = list(gpu_single.ranks(Refusing(), "cpu", [small, dataclasses.replace(small, heads=8)]))
    assert [row["ok"] for row in rows] == [False, True]
    assert gpu_single.verdicts({"ranks": rows})["wrong"] == rows[:1]
    assert "ValueError: no kernel" in gpu_single.table(rows)


def test_the_cases_cover_replication_page_sizes_and_fp8():
    cases: list[Case] = gpu_single.cases()
    assert {case.layout.kv_replication for case in cases} == {1, 2, 4}
    assert {(case.page_size, case.kv_dtype) for case in cases} == {
        (page, dtype) for page in (1, 16) for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    }


@needs_no_gpu
def test_without_a_gpu_it_says_so_and_nothing_of_sglang_is_imported():
    program = """
import sys
sys.modules["sglang"] = None  # an import would fail
from benchmarks import gpu_single
gpu_single.main()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 1
    assert "measures a CUDA device" in result.stderr
    assert "Traceback" not in result.stderr


@needs_no_gpu
def test_a_part_that_dies_or_is_late_is_named():
    rows, ended = gpu_single.run_part("gemms", 60)
    assert (rows, ended) == ([], "gemms ended with exit code 1")
    rows, ended = gpu_single.run_part("gemms", 0.01)
    assert rows == []
    assert ended.startswith("gemms was stopped after 0 s")
