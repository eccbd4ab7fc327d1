"""The report of a comparison: medians with their intervals, floors, tables; the plots are in ``benchmarks.plots``."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.floor import Floor, Machine, expected_bytes
from benchmarks.replay import Record
from benchmarks.serving import Served
from sgl_shift.shape import ModelShape

Runs = Sequence[dict[str, Any]]
RESAMPLES = 1000
TARGETS = {"TTFT": 2.8, "TPOT": 1.05, "throughput": 1.8}  # of Shift against TP, P=4, 200 Mbit/s (issue 8)


class Interval(NamedTuple):
    """A statistic with its 95% bootstrap interval; units are the statistic's."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> Interval:
        return Interval(*(factor * x for x in self))


def interval(
    turns: Sequence[Sequence[float]], statistic: Callable[[Sequence[float]], float] = statistics.median
) -> Interval:
    """Of what was seen in each turn, pooled. Turns are drawn first, then what is within each: what differs from turn to
    turn (the machine's mood) does not hide behind many requests of one turn."""
    return ratio(turns, None, statistic)


def ratio(
    turns: Sequence[Sequence[float]],
    against: Sequence[Sequence[float]] | None,
    statistic: Callable[[Sequence[float]], float] = statistics.median,
) -> Interval:
    """``statistic(turns) / statistic(against)``; both of the same turns, which are drawn together.

    Raises:
        ValueError: nothing was seen in some turn, or the turns are not as many.
    """
    both = [turns] if against is None else [turns, against]
    if not turns or not all(len(each) == len(turns) and all(each) for each in both):
        raise ValueError("a turn without a value, or turns of one side only")
    rng = random.Random(0)

    def value(pools: list[list[float]]) -> float:
        values = [statistic(pool) for pool in pools]
        if against is None:
            return values[0]
        return values[0] / values[1] if values[1] else float("inf")  # a TPOT of 0: all tokens came in one piece

    drawn = []
    for _ in range(RESAMPLES):
        chosen = rng.choices(range(len(turns)), k=len(turns))
        drawn.append(value([[x for t in chosen for x in rng.choices(each[t], k=len(each[t]))] for each in both]))
    drawn.sort()
    seen = value([[x for turn in each for x in turn] for each in both])
    return Interval(seen, drawn[int(0.025 * RESAMPLES)], drawn[int(0.975 * RESAMPLES) - 1])


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def records_of(run: dict[str, Any], phase: str) -> list[Record]:
    return [Record(**record) for record in run["phases"][phase]["records"]]


def answered(run: dict[str, Any], phase: str) -> list[Record]:
    return [record for record in records_of(run, phase) if not record.error]


def throughput(run: dict[str, Any], phase: str) -> float:
    """Prompt and output tokens of what was answered, a second, from the start of the phase to its last token."""
    done = answered(run, phase)
    return sum(r.prompt_tokens + len(r.tokens) for r in done) / max(r.at[-1] for r in done)


METRICS: dict[str, Callable[[dict[str, Any], str], list[float]]] = {
    "TTFT": lambda run, phase: [r.ttft for r in answered(run, phase)],
    "TPOT": lambda run, phase: [r.tpot for r in answered(run, phase) if r.tpot is not None],
    "completion": lambda run, phase: [r.completion for r in answered(run, phase)],
    "throughput": lambda run, phase: [throughput(run, phase)] if answered(run, phase) else [],
}


def seen(runs: Runs, name: str, phase: str, metric: str) -> list[list[float]]:
    """By turn, in the order of turns."""
    return [METRICS[metric](run, phase) for run in sorted(runs, key=lambda r: r["turn"]) if run["deployment"] == name]


def names(runs: Runs) -> list[str]:
    return list(dict.fromkeys(run["deployment"] for run in runs))


def phases(runs: Runs) -> list[str]:
    return list(dict.fromkeys(phase for run in runs for phase in run["phases"]))


def summary(runs: Runs) -> dict[str, dict[str, dict[str, Interval]]]:
    """phase, deployment, metric (seconds; tokens/s)."""
    found: dict[str, dict[str, dict[str, Interval]]] = {}
    for phase in phases(runs):
        for name in names(runs):
            row = found.setdefault(phase, {}).setdefault(name, {})
            for metric in METRICS:
                values = seen(runs, name, phase, metric)
                if values and all(values):
                    row[metric] = interval(values)
            if "TTFT" in row:
                row["TTFT p99"] = interval(seen(runs, name, phase, "TTFT"), p99)
    return found


def against(runs: Runs, other: str) -> dict[str, dict[str, dict[str, Interval]]]:
    """phase, deployment, metric: how many times the other's; of turns that both have. TTFT upside down: how much
    sooner."""
    found: dict[str, dict[str, dict[str, Interval]]] = {}
    for phase in phases(runs):
        for name in names(runs):
            if name == other:
                continue
            common = {r["turn"] for r in runs if r["deployment"] == name}
            common &= {r["turn"] for r in runs if r["deployment"] == other}
            kept = [run for run in runs if run["turn"] in common]
            for metric in ("TTFT", "TPOT", "throughput"):
                mine, theirs = (seen(kept, n, phase, metric) for n in (name, other))
                pair = (theirs, mine) if metric == "TTFT" else (mine, theirs)
                if common and all(mine) and all(theirs):
                    found.setdefault(phase, {}).setdefault(name, {})[metric] = ratio(*pair)
    return found


def disagreements(runs: Runs) -> list[str]:
    """Answers that differ from the first run's without a tie, and requests that failed."""
    found = []
    for run in runs:
        for phase, part in run["phases"].items():
            at = f"{run['deployment']}, turn {run['turn']}, {phase}"
            found += [f"{at}: request {index} is answered otherwise" for index in part["answers"]["different"]]
            found += [f"{at}: request {r['index']}: {r['error']}" for r in part["records"] if r["error"]]
    return found


def floors(
    runs: Runs, model: ModelShape, machine: Machine, served: dict[str, Served], chunk: int
) -> list[dict[str, Any]]:
    """For each deployment and phase, medians over its turns: seconds as measured, and as bytes and FLOPs allow."""
    rows = []
    for phase in phases(runs):
        for name in names(runs):
            mine = [run for run in runs if run["deployment"] == name]
            floor = Floor(model, served[name], machine, chunk)
            per_run = [(run["phases"][phase], answered(run, phase)) for run in mine]
            per_run = [(part, done) for part, done in per_run if done]
            if not per_run:
                continue
            row: dict[str, Any] = {"phase": phase, "deployment": name}
            if all(part["one_by_one"] for part, _ in per_run):
                done = [r for _, records in per_run for r in records]
                row["ttft"] = statistics.median(r.ttft for r in done)
                row["ttft_floor"] = statistics.median(floor.prefill(r.prompt_tokens, r.cached_tokens) for r in done)
                if several := [r for r in done if r.tpot is not None]:
                    row["tpot"] = statistics.median(r.tpot or 0.0 for r in several)
                    middle = (r.prompt_tokens + len(r.tokens) // 2 for r in several)
                    row["tpot_floor"] = statistics.median(floor.decode(context) for context in middle)
            else:
                row["seconds"] = statistics.median(max(r.at[-1] for r in done) for _, done in per_run)
                row["seconds_floor"] = statistics.median(floor.workload(done) for _, done in per_run)
            row["bytes_expected"] = statistics.median(
                expected_bytes(model, served[name], done, part["used"]) for part, done in per_run
            )
            if all(part["used"] for part, _ in per_run):
                row["bytes_counted"] = statistics.median(
                    sum(part["used"]["bytes_sent"].values()) for part, _ in per_run
                )
            if all(part["sent"] for part, _ in per_run):
                row["bytes_on_wire"] = statistics.median(statistics.mean(part["sent"]) for part, _ in per_run)
                row["resent"] = max(sum(part["resent"]) for part, _ in per_run)
            rows.append(row)
    return rows


def markdown(settings: dict[str, Any], runs: Runs, floor_rows: list[dict[str, Any]], plots: list[str]) -> str:
    wrong = disagreements(runs)
    ties = sum(part["answers"]["ties"] for run in runs for part in run["phases"].values())
    compared = sum(part["answers"]["compared"] for run in runs for part in run["phases"].values())
    turns = sorted({run["turn"] for run in runs})
    network = (
        f"{settings['rate_mbit']:g} Mbit/s a rank and direction (namespaces, tc)"
        if settings["rate_mbit"]
        else "loopback"
    )
    lines = [
        f"# Measured: P={settings['ranks']}, {network}",
        "",
        f"`{settings['command']}`; {settings['machine']}; SGLang {settings['sglang']}, torch {settings['torch']}, "
        f"commit {settings['commit']}. {settings['model']}.",
        "",
        f"* {len(runs)} runs in {len(turns)} turn(s); a turn runs each deployment once, in another order than the turn "
        "before. Values are medians, with 95% bootstrap intervals over turns and requests in brackets"
        + (
            "; **with fewer than five turns intervals say little about what differs from turn to turn.**"
            if len(turns) < 5
            else "."
        ),
        f"* Answers: {compared} compared with those of the first run, token by token (greedy); {ties} part at a tie, "
        + (f"**{len(wrong)} wrong**:" if wrong else "none differs otherwise, no request failed."),
        *(f"  * {line}" for line in wrong[:20]),
        "* Load of the machine (1 min average) when runs began: "
        f"{min(r['load'] for r in runs):.1f} to {max(r['load'] for r in runs):.1f}. Other work on it makes runs noisy.",
        "",
        f"Memory: {settings['rank_mb']:g} MB a rank for weights and KV cache.",
        "",
        "| deployment | weights MB a rank | KV tokens of a replica: planned, had | replicas | together | start s |",
        "|---|---|---|---|---|---|",
    ]
    for name in names(runs):
        mine, plan = [run for run in runs if run["deployment"] == name], settings["deployments"][name]
        had, replicas = mine[0]["kv_tokens"], plan["replicas"]
        seconds = statistics.median(run["start_seconds"] for run in mine)
        lines.append(
            f"| {name} | {plan['weights'] / 1e6:,.1f} | {plan['kv_tokens']:,}, {had:,} | {replicas} | "
            f"{had * replicas:,} | {seconds:.0f} |"
        )
    for phase, rows in summary(runs).items():
        lines += ["", f"## {phase}", "", settings["phases"][phase], ""]
        lines += ["| deployment | TTFT s | TTFT p99 s | TPOT ms | completion s | throughput tokens/s |"]
        lines += ["|---|---|---|---|---|---|"]
        for name, row in rows.items():
            cells = [
                _cell(row.get(metric), factor, digits)
                for metric, factor, digits in (
                    ("TTFT", 1, 2),
                    ("TTFT p99", 1, 2),
                    ("TPOT", 1e3, 1),
                    ("completion", 1, 2),
                    ("throughput", 1, 0),
                )
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines += ["", *(f"![{plot}]({plot})" for plot in plots if plot.startswith(f"{file_name(phase)}-"))]
    lines += ["", "## Against the stock deployments", "", *_against(settings, runs)]
    return "\n".join([*lines, "", *_floor_table(settings, floor_rows)]) + "\n"


def file_name(phase: str) -> str:
    return phase.replace(" ", "-").replace(",", "")


def _cell(found: Interval | None, factor: float = 1.0, digits: int = 2) -> str:
    if found is None:
        return ""
    value, low, high = found.scaled(factor)
    return f"{value:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _against(settings: dict[str, Any], runs: Runs) -> list[str]:
    lines = ["| phase | deployment | against | TTFT sooner, times | TPOT, times | throughput, times |"]
    lines.append("|---|---|---|---|---|---|")
    for other in ("TP", "DP"):
        for phase, rows in against(runs, other).items():
            for name, row in rows.items():
                cells = [_cell(row.get(metric)) for metric in TARGETS]
                lines.append(f"| {phase} | {name} | {other} | {' | '.join(cells)} |")
    if settings["ranks"] == 4 and settings["rate_mbit"] == 200:
        lines += ["", *verdicts(against(runs, "TP"))]
    return lines


def verdicts(ratios: dict[str, dict[str, dict[str, Interval]]]) -> list[str]:
    """The targets of issue 8, for Shift against TP: latencies of requests alone, throughput at saturation. Met is what
    the whole interval meets."""
    lines = []
    for metric, target in TARGETS.items():
        phase = "saturated" if metric == "throughput" else "alone"
        found = ratios.get(phase, {}).get("Shift", {}).get(metric)
        if found is None:
            lines.append(f"* Target {metric} ({phase}): not measured.")
            continue
        below = metric == "TPOT"
        meets = [x <= target if below else x >= target for x in (found.value, found.high if below else found.low)]
        said = "met" if all(meets) else "met by the median, not by the whole interval" if meets[0] else "**not met**"
        lines.append(
            f"* Target {metric} ({phase}) {'at most' if below else 'at least'} {target}: {_cell(found)}, {said}."
        )
    return lines


def _floor_table(settings: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    machine = settings["calibration"]
    link = f"{machine['link'] * 8 / 1e6:,.0f} Mbit/s" if machine["link"] else "loopback, bytes taken as free"
    lines = [
        "## How far from what bytes and FLOPs allow",
        "",
        f"Measured for one core before the runs: {machine['flops'] / 1e9:.0f} GFLOP/s (GEMM, float32), "
        f"{machine['bandwidth'] / 1e9:.1f} GB/s (GEMV); {machine['cores']} cores; link: {link}. *Allowed* is the cost "
        "model without any latency or overhead at these rates, in the faster configuration (`benchmarks/floor.py`). A "
        "whole phase: all prefills one by one, all decodes in one step; where requests arrive over time, it took at "
        "least as long as they arrived. Bytes are a rank's: *formula* of the collectives by the tokens that ran, "
        "*counted* by Shift Parallelism (its own exchanges, rank 0), *wire* by the kernel, with headers and the "
        "traffic of scheduler and client. *Resent*: TCP segments of all ranks, in the worst run; each can stall it.",
        "",
        "| phase | deployment | TTFT ms: took, allowed | TPOT ms: took, allowed | whole s: took, allowed "
        "| MB: formula, counted, wire | resent |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = []
        for key, factor, digits in (("ttft", 1e3, 0), ("tpot", 1e3, 1), ("seconds", 1, 1)):
            took, allowed = row.get(key), row.get(f"{key}_floor")
            cells.append(
                f"{took * factor:,.{digits}f}, {allowed * factor:,.{digits}f} ({took / allowed:.2f}x)"
                if took and allowed
                else ""
            )
        sizes = [row.get(f"bytes_{kind}") for kind in ("expected", "counted", "on_wire")]
        cells.append(", ".join("-" if size is None else f"{size / 1e6:,.1f}" for size in sizes))
        cells.append(str(row.get("resent", "-")))
        lines.append(f"| {row['phase']} | {row['deployment']} | {' | '.join(cells)} |")
    return lines
