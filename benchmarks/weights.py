"""What the weights of both configurations take, and what their one storage costs: ``python -m benchmarks.weights``.

For each kind of model: stock SGLang, one storage (what sgl-shift does), and two copies read one after the other
(``SGL_SHIFT_SEPARATE_WEIGHTS=1``), side by side in one run. On a CPU; times are medians of interleaved repeats.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.checkpoints import DENSE, MOE, Tiny
from tests.hosting import Host
from tests.parity import Requests

SIZES: dict[str, Any] = {"hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 64, "intermediate": 4096, "layers": 8}
EXPERTS: dict[str, Any] = {"intermediate": 1024, "layers": 4, "extra": {**MOE.extra, "moe_intermediate_size": 1024}}
MODELS = {
    "dense": dataclasses.replace(DENSE, name="dense", **SIZES),
    "tied embedding": dataclasses.replace(DENSE, name="tied", tied=True, **SIZES),
    "KV heads replicated": dataclasses.replace(DENSE, name="replicated", **{**SIZES, "kv_heads": 1}),
    "MoE": dataclasses.replace(MOE, name="moe", **{**SIZES, **EXPERTS}),
}
STOCK = "stock"
SCHEMES: dict[str, dict[str, Any]] = {
    STOCK: {"plugin": False},
    "one storage": {},
    "two copies": {"environment": {"SGL_SHIFT_SEPARATE_WEIGHTS": "1"}},
}
DECODE_TOKENS, PROMPT = 12, 1000


def measured_loading(folder: Path) -> Callable[[int], None]:
    """For ``Host(in_rank=...)``: the memory that ``ModelRunner.load_model`` adds to a rank, at its peak."""

    def in_rank(rank: int) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def initialize(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
            load = runner.load_model  # with our hook around it, if the plugin is there

            def load_model() -> None:
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
                before, started = _status("VmRSS"), time.perf_counter()
                load()
                seen = {"peak": _status("VmHWM") - before, "seconds": time.perf_counter() - started}
                (folder / f"{rank}.json").write_text(json.dumps(seen))

            runner.load_model = load_model
            return original(runner, *args, **kwargs)

        target = "sglang.srt.model_executor.model_runner.ModelRunner.initialize"
        HookRegistry.register(target, initialize, HookType.AROUND)
        HookRegistry.apply_hooks()

    return in_rank


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def seconds(host: Host, requests: Requests) -> float:
    started = time.perf_counter()
    host.generate(
        input_ids=requests.prompts,
        sampling_params=[{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in requests.max_new_tokens],
    )
    return time.perf_counter() - started


def interleaved(hosts: dict[str, Host], repeats: int, measure: Callable[[Host, int], float]) -> dict[str, float]:
    """Median seconds of each host, the hosts taking turns."""
    seen: dict[str, list[float]] = {scheme: [] for scheme in hosts}
    for turn in range(repeats):
        for scheme, host in hosts.items():
            seen[scheme].append(measure(host, turn))
    return {scheme: statistics.median(times) for scheme, times in seen.items()}


def measure(model: Tiny, world: int, sp: int, repeats: int, folder: Path) -> dict[str, dict[str, float]]:
    model.write(folder / "model")
    hosts: dict[str, Host] = {}
    result: dict[str, dict[str, float]] = {}
    for scheme, options in SCHEMES.items():
        (at := folder / scheme.replace(" ", "-")).mkdir()
        ours = {} if scheme == STOCK else {"sp_size": sp, "shift_threshold": 256}
        hosts[scheme] = host = Host(
            folder / "model", world, in_rank=measured_loading(at), log=at / "log", sleep_on_idle=True, **ours, **options
        )
        ranks = [json.loads((at / f"{rank}.json").read_text()) for rank in range(world)]
        result[scheme] = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
        if ours:
            result[scheme] |= host.info()["weight_bytes"]

    def decode(rows: int) -> Callable[[Host, int], float]:
        one, many = (Requests.random(rows, [4] * rows, [n] * rows) for n in (1, 1 + DECODE_TOKENS))
        return lambda host, _turn: (seconds(host, many) - seconds(host, one)) / DECODE_TOKENS

    def prefill(host: Host, turn: int) -> float:
        return seconds(host, Requests.random(100 + turn, [PROMPT], [1]))

    for name, what in (("decode_1", decode(1)), ("decode_8", decode(8)), ("prefill", prefill)):
        for scheme, median in interleaved(hosts, repeats, what).items():
            result[scheme][name] = median
    for host in hosts.values():
        host.close()
    return result


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    lines = [
        "| model | weights | base MB | TP MB | together MB | peak of loading MB | loading s | decode, 1 row ms "
        f"| decode, 8 rows ms | prefill, {PROMPT} tokens ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, schemes in results.items():
        for scheme, seen in schemes.items():
            sizes = [f"{seen[k] / 1e6:.1f}" if k in seen else "" for k in ("base", "shift", "resident", "peak")]
            times = [f"{seen[k] * 1e3:.1f}" for k in ("decode_1", "decode_8", "prefill")]
            lines.append(f"| {name} | {scheme} | {' | '.join([*sizes, format(seen['seconds'], '.1f'), *times])} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--sp-size", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--output", type=Path, help="a JSON file; the table goes beside it, as Markdown")
    options = parser.parse_args()
    results = {}
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = measure(MODELS[name], options.tp_size, options.sp_size, options.repeats, Path(folder))
        print(table({name: results[name]}), flush=True)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1) + "\n")
        about = (
            f"P={options.tp_size}, SP={options.sp_size}, float32 on a CPU, {options.repeats} interleaved repeats.\n\n"
        )
        options.output.with_suffix(".md").write_text(about + table(results))


if __name__ == "__main__":
    main()
