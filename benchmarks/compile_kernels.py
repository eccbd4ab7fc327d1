"""Compile the Triton kernels for real GPUs, without one: ``python -m benchmarks.compile_kernels --output FILE.json``.

Each kernel is specialised on the arguments that its launcher makes for a model, by Triton's own binder, so what is
compiled is what a GPU would get. Registers and spills are ptxas's own report; stack and shared memory those that
cuobjdump finds in the cubin. Nothing is run: this says nothing about speed.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from benchmarks.shapes import LLAMA, LLAMA_FP8, LLAMA_FP32, ODD, QWEN
from sgl_shift_kernels import triton_kernels
from sgl_shift_kernels.triton_kernels import Launch

TARGETS = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100}


SHAPES = (LLAMA, QWEN, LLAMA_FP8, LLAMA_FP32, ODD)


def compile_launch(launch: Launch, capability: int) -> dict[str, Any]:
    """Compile what ``launch`` would compile on a GPU of this capability; what it takes.

    Returns:
        registers, spill_stores and spill_loads in bytes (ptxas), stack and shared in bytes (cuobjdump),
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
    """Markdown: registers / bytes spilled / bytes of shared memory / bits of the narrowest global access."""
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
        for kernel, (launch, _bytes) in shape.launches(rows=8).items():
            for name, capability in TARGETS.items():
                results.append({"shape": shape.name, "kernel": kernel, "target": name})
                results[-1] |= compile_launch(launch, capability)
                log(f"{shape.name}: {kernel} for {name}")
    return {"triton": triton.__version__, "kernels": digest(), "results": results}


def digest() -> str:
    """Of the kernels' sources and their tile: results belong to kernels as they were."""
    kernels = [f for f in vars(triton_kernels).values() if isinstance(f, triton.runtime.JITFunction)]
    sources = "".join(inspect.getsource(kernel.fn) for kernel in kernels)
    return hashlib.sha256(f"{sources}{triton_kernels.TILE}".encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="a JSON file")
    options = parser.parse_args()
    found = compile_all()
    print(table(found["results"]))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
