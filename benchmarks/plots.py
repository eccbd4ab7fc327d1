"""Plots of a comparison, as in the paper's figures: PNG files, one colour a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.report import METRICS, Runs, answered, file_name, names, phases

COLOURS = {"TP": "tab:red", "DP": "tab:blue", "SP": "tab:green", "Shift": "black"}
BINS = 60
KINDS = ("cdf", "timeline", "throughput", "batches")


def draw(runs: Runs, folder: Path) -> list[str]:
    """All plots, into ``folder``; the names of the files. CDFs pool all turns, plots over time show the first."""
    written = []
    for phase in phases(runs):
        first = [next(run for run in runs if run["deployment"] == name) for name in names(runs)]
        for kind, figure in (
            ("cdf", cdfs(runs, phase)),
            ("timeline", time_line(first, phase)),
            ("throughput", throughput(first, phase)),
            ("batches", batches(first, phase)),
        ):
            written.append(f"{file_name(phase)}-{kind}.png")
            figure.tight_layout()
            figure.savefig(folder / written[-1], dpi=110)
            plt.close(figure)
    return written


def cdfs(runs: Runs, phase: str) -> Any:
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6))
    for axis, metric in zip(axes, ("TTFT", "TPOT", "completion"), strict=True):
        for name in names(runs):
            values = sorted(x for run in runs if run["deployment"] == name for x in METRICS[metric](run, phase))
            parts = [(i + 1) / len(values) for i in range(len(values))]
            axis.step(values, parts, where="post", color=COLOURS[name], label=name)
        axis.set(xlabel=f"{metric}, s", ylabel="part of the requests", ylim=(0, 1.02), title=phase)
        axis.grid(alpha=0.3)
    axes[0].legend()
    return figure


def time_line(runs: Runs, phase: str) -> Any:
    """Each request at the time it was sent: its TTFT and its completion time."""
    figure, axes = plt.subplots(1, 2, figsize=(13, 3.6), sharex=True)
    for axis, metric in zip(axes, ("TTFT", "completion"), strict=True):
        for run in runs:
            done = answered(run, phase)
            values = METRICS[metric](run, phase)
            axis.plot(
                [r.sent for r in done], values, "o", ms=4, color=COLOURS[run["deployment"]], label=run["deployment"]
            )
        axis.set(xlabel="sent at, s", ylabel=f"{metric}, s", title=phase)
        axis.grid(alpha=0.3)
    axes[0].legend()
    return figure


def per_bin(run: dict[str, Any], phase: str, width: float) -> list[float]:
    """Tokens/s in bins of ``width`` s: a prompt counts when its first token comes, output tokens when they come."""
    done = answered(run, phase)
    bins = [0.0] * (int(max((r.at[-1] for r in done), default=0.0) / width) + 1)
    for record in done:
        bins[int(record.at[0] / width)] += record.prompt_tokens / width
        for at in record.at:
            bins[int(at / width)] += 1 / width
    return bins


def throughput(runs: Runs, phase: str) -> Any:
    figure, axis = plt.subplots(figsize=(9, 3.6))
    longest = max((r.at[-1] for run in runs for r in answered(run, phase)), default=1.0)
    width = max(longest / BINS, 0.1)
    for run in runs:
        bins = per_bin(run, phase, width)
        starts = [i * width for i in range(len(bins) + 1)]
        axis.stairs(bins, starts, color=COLOURS[run["deployment"]], label=run["deployment"])
    axis.set(xlabel="s", ylabel="tokens/s, prompt and output", title=phase)
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def batches(runs: Runs, phase: str) -> Any:
    """Batches that each configuration has run so far, of those deployments that have two."""
    figure, axis = plt.subplots(figsize=(9, 3.6))
    for run in runs:
        samples = [s for s in run["phases"][phase]["samples"] if "batches" in s]
        for configuration, style in (("base", "-"), ("shift", "--")) if samples else ():
            counts = [s["batches"][configuration] - samples[0]["batches"][configuration] for s in samples]
            label = f"{run['deployment']}: {configuration}"
            axis.plot([s["at"] for s in samples], counts, style, color=COLOURS[run["deployment"]], label=label)
    axis.set(xlabel="s", ylabel="batches since the start", title=phase)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend()
    return figure
