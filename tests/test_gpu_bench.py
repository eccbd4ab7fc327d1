"""What ``benchmarks.gpu_node`` would measure; that it measures needs GPUs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import compare, gpu_node
from benchmarks.models import CONFIGS
from sgl_shift.shape import ModelShape


def test_every_part_is_a_comparison(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["Qwen3-32B FP8"], "max_position_embeddings": 40960}))
    trace = tmp_path / "mine.jsonl"
    request = {"timestamp": 0, "input_length": 70_000, "output_length": 9, "hash_ids": list(range(137))}
    trace.write_text(json.dumps(request) + "\n")
    given = argparse.Namespace(model=tmp_path, traces=[trace], parts=[])
    parts = gpu_node.parts(given)
    assert list(parts) == ["speed", "lengths", "bursty", "patterns", "trace-mine"]
    for arguments in parts.values():
        asked = compare.arguments(["--results", "x", "--gpu", "h200", "--ranks", "8", "--chunk", "8192", *arguments])
        phases = compare.phases_of(asked)
        assert all(phase.requests for phase in phases)
        assert all(r.prompt_tokens + r.output_tokens <= 40960 for phase in phases for r in phase.requests)
        machine = compare.floor.Machine.of_gpus(compare.GPUS["h200"], 8)
        about = compare.about(asked, arguments, machine, ModelShape.from_path(tmp_path), phases)
        kv = {name: plan["kv_tokens"] for name, plan in about["deployments"].items()}
        assert kv["DP"] < kv["SP"] == kv["Shift"] < kv["TP"]  # of a replica
    assert gpu_node.main(["--model", str(tmp_path), "--gpu", "h200", "--results", str(tmp_path / "r")]) == 2
