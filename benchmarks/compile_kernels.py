"""Compile the Triton kernels for real GPUs, without one: ``python -m benchmarks.compile_kernels --output FILE.json``.

Each kernel is specialised on the arguments that its launcher makes for a model, by Triton's own binder, so what is
compiled is what a GPU would get. Registers and spills are ptxas's own report; stack and shared memory those that
cuobjdump finds in the cubin. Nothing is run: this says nothing about speed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from sgl_shift.layout import HeadLayout, Layout
from sgl_shift_kernels import triton_kernels
from sgl_shift_kernels.triton_kernels import Launch

TARGETS = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Attention of a model on P ranks with SP degree sp: sizes of the buffers that the kernels see."""

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

    def fused_qkv(self, rows: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v [rows, heads, head_dim] of a base rank, as the slices of one output that SGLang makes them."""
        heads, kv_heads = self.heads // self.layout.layout.tp_size, self.layout.base_kv_heads
        fused = torch.zeros(rows, (heads + 2 * kv_heads) * self.head_dim, dtype=torch.float32, device=device)
        parts = fused.to(self.dtype).split([n * self.head_dim for n in (heads, kv_heads, kv_heads)], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        return q, k, v

    @property
    def widths(self) -> tuple[int, int, int]:
        """Widths of q, k and v behind the exchange."""
        layout = self.layout
        q, kv = layout.heads_per_rank * self.head_dim, layout.kv_heads_per_rank * self.head_dim
        return q, kv, kv

    def launches(self, rows: int = 8) -> dict[str, Launch]:
        """Each kernel with the arguments that a batch of ``sp * rows - 1`` tokens gives it."""
        q, k, v = self.fused_qkv(rows)
        sp, tokens = self.sp, self.sp * rows - 1
        send, pack_qkv = triton_kernels.plan_pack_qkv(q, k, v, sp, self.layout.kv_head_map)
        query, _k, _v, unpack_qkv = triton_kernels.plan_unpack_qkv(send, tokens, *self.widths)
        back, pack_output = triton_kernels.plan_pack_output(query, sp, rows)
        _output, unpack_output = triton_kernels.plan_unpack_output(back)
        return {
            "pack_qkv": pack_qkv,
            "unpack_qkv": unpack_qkv,
            "pack_output": pack_output,
            "unpack_output": unpack_output,
        }


SHAPES = (
    Shape("Llama-3.3-70B, P=8 SP=8", 8, 8, 64, 8, 128, torch.bfloat16),
    Shape("Qwen3-30B-A3B, P=8 SP=8, KV heads replicated", 8, 8, 32, 4, 128, torch.bfloat16),
    Shape("Llama-3.3-70B, P=8 SP=4, fp8", 8, 4, 64, 8, 128, torch.float8_e4m3fn),
    Shape("Llama-3.3-70B, P=8 SP=8, float32", 8, 8, 64, 8, 128, torch.float32),
    Shape("odd: P=4 SP=4, 4 heads of 5", 4, 4, 4, 1, 5, torch.bfloat16),
)


def compile_launch(launch: Launch, capability: int) -> dict[str, Any]:
    """Compile what ``launch`` would compile on a GPU of this capability; what it takes.

    Returns:
        registers, spill_stores and spill_loads in bytes (ptxas), stack and shared in bytes (cuobjdump), cubin bytes,
        load_bits and store_bits: the narrowest global access of a thread in the kernel (128 is the most there is).
    """
    target = GPUTarget("cuda", capability, 32)
    backend = make_backend(target)
    binder = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, specialization, options = binder(*launch.arguments, **launch.constants, num_warps=launch.warps)
    _, signature, constants, attributes = launch.kernel._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=options)
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    return {
        **_ptxas(ptx, capability),
        **_cubin(cubin),
        "dynamic_shared": compiled.metadata.shared,
        "cubin": len(cubin),
        "load_bits": _narrowest(ptx, "ld"),
        "store_bits": _narrowest(ptx, "st"),
    }


def _ptxas(ptx: str, capability: int) -> dict[str, int]:
    tool = (knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas).path
    arch = next(name for name, number in TARGETS.items() if number == capability)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", "--regAllocOptLevel=2", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return {
        "registers": _number(r"Used (\d+) registers", report),
        "spill_stores": _number(r"(\d+) bytes spill stores", report),
        "spill_loads": _number(r"(\d+) bytes spill loads", report),
    }


def _cubin(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {
        "cubin_registers": _number(r"REG:(\d+)", report),
        "stack": _number(r"STACK:(\d+)", report),
        "shared": _number(r"SHARED:(\d+)", report),
    }


def _number(pattern: str, report: str) -> int:
    found = re.search(pattern, report)
    if not found:
        raise RuntimeError(f"no {pattern!r} in this report:\n{report}")
    return int(found[1])


def _narrowest(ptx: str, instruction: str) -> int:
    found = re.findall(rf"\b{instruction}\.global[.\w:]*?(?:\.v(\d))?\.b(\d+)\b", ptx)
    return min(int(vector or 1) * int(bits) for vector, bits in found)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown: one row a kernel and shape, one column a target."""
    targets = list(TARGETS)
    lines = [f"| shape | kernel | {' | '.join(targets)} |", "|---|---|" + "---|" * len(targets)]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for result in results:
        cell = (
            f"{result['registers']} / {result['spill_stores'] + result['spill_loads']} / "
            f"{result['shared'] + result['dynamic_shared']} / {result['load_bits']}"
        )
        rows.setdefault((result["shape"], result["kernel"]), {})[result["target"]] = cell
    lines += [f"| {shape} | `{kernel}` | {' | '.join(r[t] for t in targets)} |" for (shape, kernel), r in rows.items()]
    return "\n".join(lines) + "\n"


def compile_all(log: Callable[[str], None] = print) -> dict[str, Any]:
    results = []
    for shape in SHAPES:
        for kernel, launch in shape.launches().items():
            for name, capability in TARGETS.items():
                results.append({"shape": shape.name, "kernel": kernel, "target": name})
                results[-1] |= compile_launch(launch, capability)
                log(f"{shape.name}: {kernel} for {name}")
    return {"triton": triton.__version__, "torch": torch.__version__, "results": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file; the table goes beside it, as Markdown")
    options = parser.parse_args()
    found = compile_all()
    print(table(found["results"]))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(table(found["results"]))


if __name__ == "__main__":
    main()
