"""The Triton kernels, compiled for GPUs that are not here, and what ``docs/gpu.md`` says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import triton

from benchmarks import compile_kernels
from benchmarks.shapes import QWEN

ROOT = Path(__file__).parent.parent
RECORDED = json.loads(max((ROOT / "benchmarks/results").glob("compile-*.json")).read_text())


def test_the_recorded_results_are_of_these_kernels():
    assert RECORDED["kernels"] == compile_kernels.digest(), (
        "run python -m benchmarks.compile_kernels --output ... again"
    )


def test_the_table_in_the_docs_is_the_recorded_one():
    assert compile_kernels.table(RECORDED["results"]) in (ROOT / "docs/gpu.md").read_text()


def test_no_kernel_spills_and_real_models_move_16_bytes_at_a_time():
    assert len(RECORDED["results"]) == 5 * 4 * 3
    for result in RECORDED["results"]:
        assert result["registers"] == result["cubin_registers"] > 0
        assert result["spill_stores"] == result["spill_loads"] == result["stack"] == 0
        assert (result["load_bits"], result["store_bits"]) == ((16, 16) if "odd" in result["shape"] else (128, 128))


def test_a_kernel_compiles_for_hopper_as_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launch, _bytes = QWEN.launches(rows=8)["pack_qkv"]
    result = compile_kernels.compile_launch(launch, 90)
    if triton.__version__ != RECORDED["triton"]:
        pytest.skip(f"recorded with Triton {RECORDED['triton']}, this is {triton.__version__}")
    assert {"shape": QWEN.name, "kernel": "pack_qkv", "target": "sm_90a", **result} in RECORDED["results"]


def test_a_batch_of_another_size_compiles_nothing():
    """Triton specialises integers that are 1 or multiples of 16; rows must not be among them."""
    backend = compile_kernels.make_backend(compile_kernels.GPUTarget("cuda", 90, 32))
    for name in ("pack_qkv", "unpack_qkv", "pack_output", "unpack_output"):
        seen = set()
        for rows in (2, 3, 16, 17, 512):
            launch, _bytes = QWEN.launches(rows)[name]
            kernel = launch.kernel
            binder = compile_kernels.create_function_from_signature(kernel.signature, kernel.params, backend)
            seen.add(str(binder(*launch.arguments, **launch.constants)[1]))
        assert len(seen) == 1, seen
