"""The paper's comparison on one machine with GPUs: ``python -m benchmarks.gpu_node``.

``--model FOLDER --gpu h200 --results DIR`` is all that it must be told. TP, DP, SP and Shift do the paper's work, each
part by ``benchmarks.compare`` into a folder of its own: requests alone and at once (TTFT, TPOT, throughput), input
lengths from 2K to 128K, bursts over a steady stream, three patterns of switching, and the traces
that are given. Stopped at any moment, the same command goes on where it was. Run ``make test ARGS="-m gpu_node"``
first: it says whether the answers are right.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks import compare, workloads
from sgl_shift.hardware import GPUS

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)


def parts(given: argparse.Namespace) -> dict[str, list[str]]:
    """Arguments of ``benchmarks.compare``, by the folder that the part goes to."""
    context = json.loads((given.model / "config.json").read_text()).get("max_position_embeddings", 32768)
    lengths = [str(length) for length in LENGTHS if length + 256 <= context]
    paper = ["--prompt", "4096", "--output", "250"]
    bursts = {"rate": 1, "burst-size": 250, "seconds": 600, "burst-every": 120, "burst-seconds": 20}
    found = {
        "speed": ["--phases", "alone", "saturated", *paper, "--alone", "10", "--saturated", "200"],
        "lengths": ["--phases", "lengths", "--lengths", *lengths, "--output", "128", "--alone", "5"],
        "bursty": ["--phases", "bursty", *paper, *(f"--{name}={value}" for name, value in bursts.items())],
        "patterns": ["--phases", *workloads.PATTERNS, "--pattern-scale", "1"],
    }
    for trace in given.traces:
        name = f"trace-{trace.stem}"
        found[name] = ["--phases", "trace", "--trace", str(trace), "--trace-longest", str(context - 1)]
    return {name: arguments for name, arguments in found.items() if not given.parts or name in given.parts}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_node", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--gpu", choices=sorted(GPUS), required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--ranks", type=int, help="GPUs (default: all)")
    parser.add_argument("--threshold", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--traces", type=Path, nargs="*", default=[], help="Azure .csv or Mooncake .jsonl")
    parser.add_argument("--parts", nargs="*", default=[], help="only these, by the names of their folders")
    parser.add_argument("--deployments", nargs="+", default=list(compare.NAMES))
    given = parser.parse_args(argv)
    found = torch.cuda.device_count()
    ranks = given.ranks or found
    if found < max(2, ranks):
        print(f"benchmarks.gpu_node: {found} GPUs found, {max(2, ranks)} are needed", file=sys.stderr)
        return 2
    common = ["--model", str(given.model), "--gpu", given.gpu, "--ranks", str(ranks), "--turns", str(given.turns)]
    common += ["--threshold", str(given.threshold), "--chunk", str(given.chunk), "--run-minutes", "60"]
    common += ["--deployments", *given.deployments]
    codes = {}
    for name, arguments in parts(given).items():
        print(f"--- {name}", flush=True)
        codes[name] = compare.main([*common, "--results", str(given.results / name), *arguments])
    print(*(f"{given.results / name / 'report.md'}: exit {code}" for name, code in codes.items()), sep="\n")
    return max(codes.values(), default=0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
