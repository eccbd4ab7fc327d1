"""What is lost by running a batch in the configuration that ``--shift-threshold auto`` chooses: ``python -m
benchmarks.regret``.

An engine measures its thresholds when it starts. Then, on its ranks, steps of 1 to 4,096 tokens run in TP, in SP and as
the server chooses, in turn, prefill-shaped and decode-shaped. Regret is the time of the choice over that of the better
configuration, less one: the median over the rounds, with a 95% interval (bootstrap over rounds). It also measures what
a switch costs: a step after one of the other configuration, against one after its like. On a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sgl_shift.policy import Configuration, choose
from tests.checkpoints import DENSE
from tests.hosting import Host
from tests.probes import Probe

MODEL = dataclasses.replace(
    DENSE,
    name="regret",
    hidden=256,
    heads=8,
    kv_heads=4,
    head_dim=32,
    intermediate=1024,
    layers=4,
    extra={"max_position_embeddings": 8192},
)
MOST = {"prefill": 4096, "decode": 256}
SIZES = sorted({1, *(2**n for n in range(1, 13)), *(3 * 2**n for n in range(11))})
CHOICE = "choice"
SWITCHING = {"decode": 8, "prefill": 256}  # tokens of the steps that switch, or not
ROUNDS = 40


def sweep(seconds: float) -> Callable[[Any], dict[str, Any]]:
    """For ``Probe(extra=...)``: runs on every rank at once, and on all as long."""

    def extra(scheduler: Any) -> dict[str, Any]:
        from sgl_shift_patches import autotune, state

        shift, eager = state.current(), scheduler.tp_worker.model_runner.eager_runner
        assert shift is not None
        seen: dict[str, Any] = {"measured": shift.report()["measured"], "steps": {}, "switching": {}}
        with shift.stats.paused(), torch.no_grad(), eager.model_context():
            for kind, most in MOST.items():
                run = autotune.Steps(shift, eager, kind, most)
                sizes = [size for size in SIZES if size <= most]
                seen["steps"][kind] = _steps(run, sizes, 0.4 * seconds)
                for size, times in seen["steps"][kind].items():
                    times["chosen"] = str(choose(shift.settings, size, base_can_run=True, kind=kind))
                seen["switching"][kind] = _switching(run, SWITCHING[kind], 0.1 * seconds)
        return seen

    return extra


def _steps(run: Any, sizes: Sequence[int], seconds: float) -> dict[int, dict[str, Any]]:
    kinds: list[Configuration | None] = [*Configuration, None]
    times: dict[int, dict[str, Any]] = {size: {str(kind or CHOICE): [] for kind in kinds} for size in sizes}
    spent = 0.0
    for number in range(ROUNDS + 1):  # the first is not counted
        for size in sizes:
            for kind in kinds[number % 3 :] + kinds[: number % 3]:
                step = run(size, kind)
                spent += step.cost
                if number:
                    times[size][str(kind or CHOICE)].append(step.seconds)
        if spent > seconds and number >= 3:
            break
    return times


def _switching(run: Any, tokens: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    times: dict[str, dict[str, list[float]]] = {str(c): {"same": [], "switched": []} for c in Configuration}
    base, shift = Configuration
    last, spent = base, run(tokens, base).cost
    while spent < seconds:
        for configuration in (base, base, shift, shift, base, shift):  # after each, its like and the other as often
            step = run(tokens, configuration)
            spent += step.cost
            times[str(configuration)]["same" if configuration is last else "switched"].append(step.seconds)
            last = configuration
    return times


def interval(values: Sequence[float], statistic: Callable[[list[float]], float] = median) -> tuple[float, float]:
    """95%, by bootstrap."""
    rng = random.Random(1)
    draws = sorted(statistic(rng.choices(values, k=len(values))) for _ in range(1000))
    return draws[25], draws[-26]


def summary(seen: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds, regrets and the ratio of switched steps to others, each with its interval."""
    result: dict[str, Any] = {"measured": seen["measured"], "steps": {}, "switching": {}}
    for kind, sizes in seen["steps"].items():
        rows = result["steps"][kind] = []
        for size, times in sizes.items():
            better = min(map(str, Configuration), key=lambda c: median(times[c]))
            ratios = [chosen / best - 1 for chosen, best in zip(times[CHOICE], times[better], strict=True)]
            rows.append(
                {
                    "tokens": size,
                    **{f"{name}_ms": median(times[name]) * 1e3 for name in (*map(str, Configuration), CHOICE)},
                    "better": better,
                    "chosen": times["chosen"],
                    "lost": median(times[times["chosen"]]) / median(times[better]) - 1,
                    "regret": median(ratios),
                    "interval": interval(ratios),
                    "rounds": len(ratios),
                }
            )
    for kind, configurations in seen["switching"].items():
        for name, times in configurations.items():
            pairs = list(zip(times["switched"], times["same"], strict=False))
            ratios = [switched / same - 1 for switched, same in pairs]
            cost = {"more": median(ratios), "interval": interval(ratios), "steps": len(ratios)}
            result["switching"][f"{kind}, {SWITCHING[kind]} tokens, {name}"] = cost
    return result


def table(result: dict[str, Any]) -> str:
    lines = []
    for kind, rows in result["steps"].items():
        measured = result["measured"][kind]
        ladder = ", ".join(f"{r['tokens']}: {r['base_ms']:.2f}/{r['shift_ms']:.2f}" for r in measured["ladder"])
        lines += [
            f"## {kind.capitalize()} steps",
            "",
            f"Threshold {measured['threshold']}. Ladder, base/shift ms: {ladder}.",
        ]
        lines += ["", "| tokens | TP ms | SP ms | choice ms | chosen | lost | regret | 95% | rounds |"]
        lines.append("|---|---|---|---|---|---|---|---|---|")
        for row in rows:
            low, high = row["interval"]
            lines.append(
                f"| {row['tokens']} | {row['shift_ms']:.2f} | {row['base_ms']:.2f} | {row['choice_ms']:.2f} "
                f"| {'SP' if row['chosen'] == 'base' else 'TP'} | {row['lost']:.1%} | {row['regret']:.1%} "
                f"| {low:.1%} to {high:.1%} | {row['rounds']} |"
            )
        lines.append("")
    lines += ["## A switch", "", "| step | longer after the other configuration | 95% | steps |", "|---|---|---|---|"]
    for name, cost in result["switching"].items():
        low, high = cost["interval"]
        lines.append(f"| {name} | {cost['more']:.1%} | {low:.1%} to {high:.1%} | {cost['steps']} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tp-size", type=int, default=2)
    parser.add_argument("--sp-size", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=150, help="of the sweep, roughly; at most 250")
    parser.add_argument("--output", type=Path, help="a JSON file; the tables go beside it, as Markdown")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        MODEL.write(folder / "model")
        host = Host(
            folder / "model",
            options.tp_size,
            sp_size=options.sp_size,
            shift_threshold="auto",
            in_rank=Probe(folder, sweep(min(options.seconds, 250))).install,
            log=folder / "log",
            sleep_on_idle=True,
            max_running_requests=MOST["decode"],
            chunked_prefill_size=MOST["prefill"],
            max_total_tokens=2 * MOST["prefill"],
            context_length=2 * MOST["prefill"],
        )
        load = os.getloadavg()[0]
        result = summary(host.probe(folder)[0]["extra"])
        load = max(load, os.getloadavg()[0])
        host.close()
    result["load"] = load
    about = (
        f"P={options.tp_size}, SP={options.sp_size}, {MODEL.layers} layers of hidden size {MODEL.hidden}, float32, on "
        f"{os.cpu_count()} CPU cores. Load of the machine: {load:.1f}, of which {options.tp_size} are this. *Lost* is "
        "the median of the configuration that is chosen over that of the better one, *regret* the same of the steps "
        "that ran as chosen, paired: 0 but for noise where the better one was chosen.\n\n"
    )
    print(about + table(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(about + table(result))


if __name__ == "__main__":
    main()
