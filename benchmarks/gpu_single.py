"""What one GPU can say: ``python -m benchmarks.gpu_single --output benchmarks/results/gpu-single-<date>.json``.

Needs a CUDA device, torch, Triton and FlashInfer; not SGLang (``pip install --no-deps -e .`` is enough beside them).
Ends within six minutes, prints tables, writes JSON. What it measures, ``docs/gpu.md`` says.

* kernels: pack and unpack around the all-to-alls against a contiguous copy of the same bytes, by CUDA graph replay;
* gemms: the column slices that row-parallel TP weights are (``docs/weights.md``) against contiguous weights;
* ranks: FlashInfer's paged prefill and decode on P virtual ranks (``benchmarks.virtual_ranks``).

Each part is a process of its own with its share of the time: a part that is late or dies loses no other's results.
FlashInfer compiles its kernels on first use, which takes minutes: a process beside the first parts has it do so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.shapes import LLAMA, LLAMA_FP8, QWEN, Shape
from benchmarks.virtual_ranks import Case, Pages, check
from sgl_shift_kernels import reference, triton_kernels
from sgl_shift_kernels.triton_kernels import TILE, WORDS, Tile

MB = 1 << 20
SECONDS = {"kernels": 110, "gemms": 50, "ranks": 345}  # at most
TOGETHER = 345
SIZES = (32 << 10, 256 << 10, 2 * MB, 16 * MB, 64 * MB, 256 * MB, 512 * MB)  # of what is sent
RATIO, BANDWIDTH, FROM = 1.15, 0.85, 256 * MB  # the aims: times a copy; of copy bandwidth, from this size up
TILES = (TILE, Tile(32, 256, 4), Tile(8, 1024, 4), Tile(32, 512, 8), Tile(16, 1024, 8), Tile(4, 2048, 4))

Row = dict[str, Any]
# Seconds of one call, of functions that are called in turn so that caches hold little of what the next one reads.
Timer = Callable[[Sequence[Callable[[], Any]]], float]


def by_graph_replay(calls: Sequence[Callable[[], Any]], replays: int = 7) -> float:
    """Seconds of a call: all of ``calls`` captured in one CUDA graph, the median of its replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # compiles and loads what is not yet
            call()
    stream.synchronize()
    times = max(1, 32 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            for call in calls:
                call()
    seen = []
    for _ in range(replays + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seen.append(start.elapsed_time(end) * 1e-3)
    seconds: float = statistics.median(seen[2:])
    return seconds / (times * len(calls))


def kernels(timer: Timer, device: str, shapes: Sequence[Shape], sizes: Sequence[int]) -> Iterator[Row]:
    """Every kernel at every size: right or not, seconds, GB/s, and times a contiguous copy of the same bytes."""
    for shape in shapes:
        for size in sizes:
            rows = max(1, size // (shape.sp * sum(shape.widths) * shape.dtype.itemsize))
            right = kernels_are_right(shape, rows, device) if size <= 64 * MB else {}
            sets = [shape.launches(rows, device) for _ in range(_sets(size))]
            for name, (_, moved) in sets[0].items():
                seconds = timer([launches[name][0].run for launches in sets])
                copy = timer(contiguous_copies(moved, len(sets), device))
                yield {
                    "kernel": name,
                    "shape": shape.name,
                    "rows": rows,
                    "bytes": moved,
                    "right": right.get(name),
                    "us": seconds * 1e6,
                    "GB/s": moved / seconds / 1e9,
                    "copy GB/s": moved / copy / 1e9,
                    "times a copy": seconds / copy,
                }


def tiles(timer: Timer, device: str, shape: Shape, size: int, choices: Sequence[Tile] = TILES) -> Iterator[Row]:
    """The kernels with other tiles than the one that serves: is there a better one?"""
    rows = max(1, size // (shape.sp * sum(shape.widths) * shape.dtype.itemsize))
    for tile in choices:
        sets = [shape.launches(rows, device, tile) for _ in range(_sets(size))]
        for name in ("pack_qkv", "unpack_qkv", "unpack_output"):
            seconds = timer([launches[name][0].run for launches in sets])
            yield {"tile": "x".join(map(str, tile)), "kernel": name, "us": seconds * 1e6}


def kernels_are_right(shape: Shape, rows: int, device: str) -> dict[str, bool]:
    """Whether each kernel leaves the reference's bits, on random bits."""
    q, k, v = shape.qkv(rows, device)
    tokens = shape.sp * rows - 1
    send = reference.pack_qkv(q, k, v, shape.sp, shape.layout.kv_head_map)
    there = reference.unpack_qkv(send, tokens, *shape.widths)
    back = reference.pack_output(there[0], shape.sp, rows)
    return {
        "pack_qkv": _same(triton_kernels.pack_qkv(q, k, v, shape.sp, shape.layout.kv_head_map), send),
        "unpack_qkv": all(map(_same, triton_kernels.unpack_qkv(send, tokens, *shape.widths), there)),
        "pack_output": _same(triton_kernels.pack_output(there[0], shape.sp, rows), back),
        "unpack_output": _same(triton_kernels.unpack_output(back), reference.unpack_output(back)),
    }


def _same(mine: torch.Tensor, right: torch.Tensor) -> bool:
    word = WORDS[right.element_size()]
    return bool(torch.equal(mine.contiguous().view(word), right.contiguous().view(word)))


def contiguous_copies(moved: int, count: int, device: str) -> list[Callable[[], Any]]:
    """Copies that read and write ``moved`` bytes together."""
    pairs = [tuple(torch.empty(moved // 2, dtype=torch.uint8, device=device) for _ in range(2)) for _ in range(count)]
    return [partial(to.copy_, source) for to, source in pairs]


def _sets(size: int) -> int:
    """Buffers to take turns with: more than any L2 holds, but for the small sizes, which stay in it."""
    return max(2, min(16, 512 * MB // size))


def gemms(
    timer: Timer, device: str, layers: dict[str, tuple[int, int]], world: int, rows: Sequence[int], dtype: torch.dtype
) -> Iterator[Row]:
    """``x @ W.T`` of a row-parallel layer under TP: W a column slice of the base weight, or contiguous.

    Args:
        layers: out and in features of the base weight (SP = P: of the whole layer); a rank's slice is in/world wide.
    """
    for name, (out_features, in_features) in layers.items():
        width = in_features // world
        base = torch.randn(out_features, in_features, device=device, dtype=dtype)
        slices = base.split(width, dim=1)
        copies = [part.contiguous() for part in slices]
        for count in rows:
            x = torch.randn(count, width, device=device, dtype=dtype)
            times = {
                kind: timer([partial(F.linear, x, weight) for weight in weights])
                for kind, weights in (("strided", slices), ("contiguous", copies))
            }
            difference = (F.linear(x, slices[0]) - F.linear(x, copies[0])).abs().max().item()
            yield {
                "layer": name,
                "rows": count,
                "weight": f"{out_features} x {width}",
                "strided us": times["strided"] * 1e6,
                "contiguous us": times["contiguous"] * 1e6,
                "ratio": times["strided"] / times["contiguous"],
                "difference": difference,
            }
        del base, slices, copies


class FlashInferAttention:
    """FlashInfer's paged wrappers, chosen and planned as SGLang's ``flashinfer_backend.py`` does it.

    That is: fa2, NHD, and decode on tensor cores for fp8 caches and from four query heads a KV head.
    """

    def __init__(self, device: str) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        workspace = torch.zeros(128 * MB, dtype=torch.uint8, device=device)
        self.prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self.decodes = {
            tensor_cores: BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_tensor_cores=tensor_cores, backend="fa2"
            )
            for tensor_cores in (False, True)
        }
        self.planned: Any = None

    def plan(self, pages: Pages, heads: int, kv_heads: int, head_dim: int, dtypes: tuple[torch.dtype, Any]) -> None:
        where = (pages.kv_indptr, pages.kv_indices, pages.last_page_len)
        sizes = (heads, kv_heads, head_dim, pages.page_size)
        about = {"q_data_type": dtypes[0], "kv_data_type": dtypes[1], "sm_scale": 1 / math.sqrt(head_dim)}
        if pages.is_decode:
            self.planned = self.decodes[dtypes[1].itemsize == 1 or heads // kv_heads >= 4]
            self.planned.plan(*where, *sizes, **about)
        else:
            self.planned = self.prefill
            self.planned.plan(pages.qo_indptr, *where, *sizes, causal=True, **about)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.planned.run(q, (k_cache, v_cache))
        return output


def cases() -> list[Case]:
    """P, SP, heads, KV heads: Llama-70B's group of eight; KV heads on two ranks and on four; no GQA."""
    models = ((8, 8, 64, 8), (8, 4, 32, 4), (8, 8, 16, 2), (4, 2, 8, 8))
    return [
        Case(*model, 128, page_size, torch.bfloat16, kv_dtype)
        for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn)
        for model in models
        for page_size in (1, 16)
    ]


def ranks(attention: Any, device: str, which: Sequence[Case]) -> Iterator[Row]:
    for case in which:
        about = {
            "P": case.world,
            "SP": case.sp,
            "heads": f"{case.heads}/{case.kv_heads}",
            "page": case.page_size,
            "KV": str(case.kv_dtype).removeprefix("torch."),
        }
        try:
            yield {**about, **check(case, attention, device)}
        except Exception as error:  # one case that FlashInfer refuses is a result, the others are still wanted
            yield {**about, "ok": False, "failed": f"{type(error).__name__}: {error}"}


def compile_flashinfer(attention: FlashInferAttention) -> None:
    """Plan all cases once: FlashInfer compiles what it then calls."""
    for tokens in (2, 1):  # prefill, decode
        counts = torch.tensor([0, tokens]), torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([tokens])
        qo_indptr, kv_indptr, kv_indices, last = (count.to(torch.int32) for count in counts)
        pages = Pages(qo_indptr, kv_indptr, kv_indices, last, page_size=16)
        for case in cases():
            heads, kv_heads = case.layout.heads_per_rank, case.layout.kv_heads_per_rank
            attention.plan(pages, heads, kv_heads, case.head_dim, (case.dtype, case.kv_dtype))


def part(name: str) -> Iterator[tuple[str, Row]]:
    """The rows of one part, each with the table that it belongs to."""
    if name == "kernels":
        yield from (("kernels", row) for row in kernels(by_graph_replay, "cuda", (LLAMA, QWEN, LLAMA_FP8), SIZES))
        yield from (("tiles", row) for row in tiles(by_graph_replay, "cuda", LLAMA, 256 * MB))
    elif name == "gemms":
        layers = {"Llama-70B o_proj": (8192, 8192), "Llama-70B down_proj": (8192, 28672)}
        rows = gemms(by_graph_replay, "cuda", layers, 8, (1, 8, 64, 256), torch.bfloat16)
        yield from (("gemms", row) for row in rows)
    elif name == "compile":
        compile_flashinfer(FlashInferAttention("cuda"))
    else:
        yield from (("ranks", row) for row in ranks(FlashInferAttention("cuda"), "cuda", cases()))


def run_part(name: str, seconds: float) -> tuple[list[tuple[str, Row]], str]:
    """One part in a process of its own: what it found, and why it ended early if it did."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as found:
        process = start_part(name, "--rows", found.name)
        try:
            code = process.wait(max(seconds, 0))
            ended = f"{name} ended with exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            alone = f"python -m benchmarks.gpu_single --part {name}"
            ended = f"{name} was stopped after {seconds:.0f} s; alone it may take as long as it needs: {alone}"
        finally:
            stop(process)
        # A row that was being written when the process was stopped has no end of line.
        return [tuple(json.loads(line)) for line in found if line.endswith("\n")], ended


def start_part(name: str, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.gpu_single", "--part", name, *more]
    return subprocess.Popen(command, start_new_session=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a part with all that it started: FlashInfer's compilers."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def table(rows: Sequence[Row]) -> str:
    """Markdown, a column a key."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [f"| {' | '.join(keys)} |", "|---" * len(keys) + "|"]
    for row in rows:
        values = [row.get(key, "") for key in keys]
        cells = [f"{value:.3g}" if isinstance(value, float) else str(value) for value in values]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def verdicts(tables: dict[str, list[Row]]) -> dict[str, Any]:
    """What the tables show: ``wrong`` lists results that are not right, the others what misses its aim."""
    measured = tables.get("kernels", [])
    return {
        "wrong": [row for row in measured if row["right"] is False]
        + [row for row in tables.get("ranks", []) if not row["ok"]],
        f"slower than {RATIO} times a copy": [row for row in measured if row["times a copy"] > RATIO],
        f"below {BANDWIDTH} of copy bandwidth from 256 MB": [
            row for row in measured if row["bytes"] / 2 >= FROM and row["times a copy"] > 1 / BANDWIDTH
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file; the tables go beside it, as Markdown")
    parser.add_argument("--part", choices=["compile", *SECONDS], help="this part alone, however long it takes")
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)  # where a part writes its rows
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(
            f"benchmarks.gpu_single measures a CUDA device, and torch {torch.__version__} sees none here. Its logic is "
            "tested without one: pytest tests/test_gpu_single.py tests/test_virtual_ranks.py tests/test_kernels.py"
        )
    if options.part in (None, "compile", "ranks") and not importlib.util.find_spec("flashinfer"):
        raise SystemExit("the virtual ranks need FlashInfer: pip install flashinfer-python==0.7.2")
    if options.part:
        for name, row in part(options.part):
            print(table([row]), flush=True)
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps([name, row]) + "\n")
        return

    started = time.perf_counter()
    tables: dict[str, list[Row]] = {}
    incomplete = []
    compiling = start_part("compile")
    try:
        for name, seconds in SECONDS.items():
            found, ended = run_part(name, min(seconds, TOGETHER - (time.perf_counter() - started)))
            for target, row in found:
                tables.setdefault(target, []).append(row)
            incomplete += [ended] if ended else []
    finally:
        stop(compiling)
    results = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": time.perf_counter() - started,
        "incomplete": incomplete,
        **verdicts(tables),
        **tables,
    }
    text = "\n".join(f"## {name}\n\n{table(rows)}" for name, rows in tables.items())
    short = "".join(f"* {name}: {len(rows)}\n" for name, rows in verdicts(tables).items())
    text = f"{results['device']}, torch {torch.__version__}\n\n{short}\n{text}"
    print(text, *incomplete, sep="\n")
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(text)
    if results["wrong"] or incomplete:
        raise SystemExit(f"{len(results['wrong'])} results are wrong, {len(incomplete)} parts are incomplete")


if __name__ == "__main__":
    main()
