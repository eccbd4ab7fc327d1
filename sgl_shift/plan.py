"""``python -m sgl_shift.plan``: which parallelism for this model on these GPUs, and is Shift Parallelism worth it?

    python -m sgl_shift.plan --model-path M --gpu h200 --num-gpus 8
    python -m sgl_shift.plan --model-path M --gpu h100 --num-gpus 8 --trace conversation_trace.jsonl

Predicts every way to split the GPUs into replicas and (SP, TP): memory, KV tokens, TTFT and TPOT of a request alone,
throughput at saturation, and with ``--trace`` the same under that load. Reads ``config.json`` only; needs no GPU, no
SGLang and no torch. Predictions are a cost model's (docs/results.md says how far off it has been), not measurements.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sgl_shift import support
from sgl_shift.config import Settings
from sgl_shift.cost import Batch, Chunk, StepCost
from sgl_shift.deployment import Deployment, DoesNotFitError, Scheduler, weights_of
from sgl_shift.hardware import GPUS, MIB, Profile
from sgl_shift.layout import Layout, LayoutError, divisors
from sgl_shift.served import Result
from sgl_shift.shape import ModelShape, ShapeError
from sgl_shift.simulate import simulate
from sgl_shift.traces import Request, Scale, TraceError, load

GOALS = {
    "balanced": "smallest TTFT x TPOT / throughput",
    "latency": "soonest answer to a request alone (with --trace: smallest median completion time)",
    "throughput": "highest throughput at saturation",
}
SATURATING = 2000  # requests at once
SAME = 1.03  # ratios within 3% are called the same
# Shift must beat stock SGLang by so much: less is within what the model cannot tell, and Shift takes memory.
WORTH = 1.1


@dataclass(frozen=True)
class Workload:
    """What the plan is for: lengths of a typical request, and a trace or none."""

    prompt: int
    output: int
    trace: Sequence[Request] = ()


@dataclass(frozen=True)
class Plan:
    """One way to use the GPUs, with what is predicted for it."""

    deployment: Deployment
    layout: Layout
    weights: float  # bytes a GPU
    alone: Result
    saturated: Result
    traced: Result | None

    @property
    def name(self) -> str:
        replicas = self.deployment.replicas
        sp, tp, world = self.layout.sp_size, self.layout.tp_size, self.layout.world_size
        inside = f"TP={world}" if sp == 1 else f"Shift (SP={sp}" + (f", TP={tp})" if tp > 1 else ")")
        if replicas == 1:
            return inside
        return f"DP={replicas}" if world == 1 else f"DP={replicas} x {inside}"

    @property
    def is_shift(self) -> bool:
        return self.layout.sp_size > 1

    @property
    def seen(self) -> Result:
        """Where latencies are read from."""
        return self.traced or self.alone

    @property
    def ttft(self) -> float:
        return self.seen.median(lambda s: s.ttft)

    @property
    def tpot(self) -> float:
        return self.seen.median(lambda s: s.tpot)

    @property
    def throughput(self) -> float:
        return self.saturated.throughput

    @property
    def kv_bytes(self) -> float:
        return self.deployment.kv_tokens * self.deployment.shift.kv_bytes

    def score(self, goal: str) -> float:
        """Smaller is better."""
        if goal == "throughput":
            return 1 / self.throughput
        if goal == "latency":
            return self.seen.median(lambda s: s.completion)
        return self.ttft * max(self.tpot, 1e-9) / self.throughput  # a single output token has no TPOT

    def command(self, model_path: str, flags: Iterable[str]) -> str:
        """What starts it, for SGLang's flags and ours: ``--tp-size`` is the world of one replica."""
        door = "sgl_shift.launch_server" if self.is_shift else "sglang.launch_server"
        parts = [f"python -m {door} --model-path {model_path} --tp-size {self.layout.world_size}"]
        if self.deployment.replicas > 1:
            parts.append(f"--dp-size {self.deployment.replicas}")
        if self.is_shift:
            parts.append(f"--sp-size {self.layout.sp_size} --shift-threshold {self.deployment.settings.threshold}")
        parts.append(f"--chunked-prefill-size {self.deployment.scheduler.step_tokens}")
        return " ".join([*parts, *(flag for flag in flags if self.is_shift or not flag.startswith("--shift-"))])


def usable_bytes(memory: float, world: int, chunk: int) -> float:
    """What SGLang leaves for weights and KV cache on a GPU (its default ``--mem-fraction-static``, in bytes).

    ``arg_groups/memory_hook.py:handle_gpu_memory_settings``: a constant, 1.5 MB for each token of a chunk, the graphs.
    """
    graphs = 2 * (512 if world >= 4 else 256)
    reserved = max(512 + 1.5 * chunk + world / 8 * 1024 + graphs, 10 * 1024)
    return memory - reserved * MIB


def default_chunk(memory: float) -> int:
    """SGLang's default ``--chunked-prefill-size`` (same function)."""
    for limit, chunk in ((20, 2048), (60, 4096), (160, 8192)):
        if memory < limit * 1024 * MIB:
            return chunk
    return 16384


def crossing(base: StepCost, shift: StepCost, most: int) -> int | None:
    """The threshold: the most tokens up to which stock TP is the faster one; None if it is so up to ``most``."""
    sizes = range(16, most + 1, 16)
    slower = [n for n in sizes if base.seconds(Batch((Chunk(n),))) >= shift.seconds(Batch((Chunk(n),)))]
    if not slower:
        return sizes[0]
    return None if slower[-1] == sizes[-1] else slower[-1]


def plans(
    model: ModelShape, profile: Profile, gpus: int, workload: Workload, chunk: int | None = None
) -> tuple[list[Plan], list[str]]:
    """Every split of ``gpus`` GPUs, and why those that are missing are not possible."""
    found: list[Plan] = []
    impossible: list[str] = []
    for replicas in divisors(gpus):
        for sp in divisors(gpus // replicas):
            layout = Layout(gpus // replicas, sp)
            label = f"DP={replicas}, SP={sp}, TP={layout.tp_size}" if replicas > 1 else f"SP={sp}, TP={layout.tp_size}"
            try:
                found.append(_plan(model, profile, replicas, layout, workload, chunk))
            except (LayoutError, DoesNotFitError, _NeverFasterError) as error:
                impossible.append(f"{label}: {error}")
    return found, impossible


class _NeverFasterError(ValueError):
    """A base configuration that stock TP beats at every batch size."""


def _plan(
    model: ModelShape, profile: Profile, replicas: int, layout: Layout, workload: Workload, chunk: int | None
) -> Plan:
    world, step = layout.world_size, chunk or default_chunk(profile.hardware.memory)
    usable = usable_bytes(profile.hardware.memory, world, step)
    scheduler = Scheduler("sglang", step)
    deployment = Deployment.of("", model, profile, layout, usable, replicas=replicas, scheduler=scheduler)
    if deployment.base is not None:
        threshold = crossing(deployment.base, deployment.shift, step)
        if threshold is None:
            raise _NeverFasterError(f"stock TP is the faster one for every batch up to {step:,} tokens")
        deployment = replace(deployment, settings=Settings(threshold))
    one = Request(0.0, workload.prompt, workload.output)
    if deployment.kv_tokens < workload.prompt + workload.output:
        raise DoesNotFitError(f"room for {deployment.kv_tokens:,} KV tokens, less than one request")
    return Plan(
        deployment,
        layout,
        weights_of(model, layout, profile.hardware),
        simulate(deployment, [one]),
        simulate(deployment, [one] * SATURATING),
        simulate(deployment, workload.trace) if workload.trace else None,
    )


def verdict(found: Sequence[Plan], workload: Workload, goal: str) -> tuple[Plan, list[str]]:
    """The recommended plan, and the reasons, for or against Shift Parallelism."""

    def score(plan: Plan) -> float:
        return plan.score(goal)

    shift = min((plan for plan in found if plan.is_shift), key=score, default=None)
    stock = min((plan for plan in found if not plan.is_shift), key=score, default=None)
    if shift is None:
        assert stock is not None
        several = any(plan.layout.world_size * plan.deployment.replicas > 1 for plan in found)
        why = "no split with SP is possible, for the reasons above" if several else "one GPU cannot be split"
        return stock, [f"Shift does not pay here: {why}"]
    if stock is None:
        return shift, []
    if score(shift) * WORTH <= score(stock):
        plain = [plan for plan in found if not plan.is_shift]
        widest, fastest = max(plain, key=lambda p: p.layout.world_size), max(plain, key=lambda p: p.throughput)
        others = {plan.name: plan for plan in (widest, fastest)}
        return shift, [f"against {name}: {_compared(shift, plan)}" for name, plan in others.items()]
    against = f"Shift does not pay here. {shift.name} against {stock.name}: {_compared(shift, stock)}"
    return stock, [against, *why_not(shift, stock, workload)]


def why_not(shift: Plan, stock: Plan, workload: Workload) -> list[str]:
    """What keeps Shift from being the better one."""
    reasons = []
    mine, theirs = (plan.deployment.kv_tokens * plan.deployment.replicas for plan in (shift, stock))
    if mine < 0.8 * theirs:
        reasons.append(
            f"weights of both configurations take {shift.weights / 1e9:,.1f} GB a GPU, of {stock.name} "
            f"{stock.weights / 1e9:,.1f}: that leaves {mine:,} KV tokens instead of {theirs:,}"
        )
    threshold, step = shift.deployment.settings.threshold, shift.deployment.scheduler.step_tokens
    if workload.prompt <= threshold:
        reasons.append(
            f"SP is the faster one above {threshold:,} tokens only: a prompt of {workload.prompt:,} runs in TP"
        )
    assert shift.deployment.base is not None
    chunk = Batch((Chunk(step),))
    base, full = shift.deployment.base.seconds(chunk), shift.deployment.shift.seconds(chunk)
    reasons.append(
        f"{step:,} tokens take {1e3 * base:,.0f} ms in its base configuration, {1e3 * full:,.0f} ms in TP: SP can save "
        "collectives and replicated work, not arithmetic"
    )
    return reasons


def _compared(plan: Plan, other: Plan) -> str:
    def ratio(mine: float, theirs: float) -> str:
        return "the same" if max(mine, theirs) <= SAME * min(mine, theirs) else f"{mine / theirs:.2f}x"

    return (
        f"TTFT {ratio(plan.ttft, other.ttft)}, TPOT {ratio(plan.tpot, other.tpot)}, "
        f"throughput {ratio(plan.throughput, other.throughput)}"
    )


def table(found: Sequence[Plan], best: Plan) -> str:
    """One line a plan; the recommended one is marked."""
    head = ["", "plan", "weights", "KV", "KV tokens", "threshold", "TTFT", "TPOT", "throughput"]
    units = ["", "", "GB/GPU", "GB/GPU", "in all", "tokens", "ms", "ms", "tok/s"]
    traced = any(plan.traced for plan in found)
    if traced:
        head += ["trace TTFT", "p99", "TPOT", "done after"]
        units += ["ms", "ms", "ms", "min"]
    rows = [head, units]
    for plan in found:
        row = [
            "*" if plan is best else "",
            plan.name,
            f"{plan.weights / 1e9:.1f}",
            f"{plan.kv_bytes / 1e9:.1f}",
            f"{plan.deployment.kv_tokens * plan.deployment.replicas:,}",
            str(plan.deployment.settings.threshold) if plan.is_shift else "",
            f"{1e3 * plan.alone.median(lambda s: s.ttft):,.0f}",
            f"{1e3 * plan.alone.median(lambda s: s.tpot):.1f}",
            f"{plan.throughput:,.0f}",
        ]
        if plan.traced:
            result = plan.traced
            row += [
                f"{1e3 * result.median(lambda s: s.ttft):,.0f}",
                f"{1e3 * result.quantile(lambda s: s.ttft, 0.99):,.0f}",
                f"{1e3 * result.median(lambda s: s.tpot):.1f}",
                f"{result.seconds / 60:.1f}" + (f" ({result.refused} too long)" if result.refused else ""),
            ]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    left = {0, 1}
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def report(
    model: ModelShape,
    profile: Profile,
    gpus: int,
    workload: Workload,
    goal: str,
    model_path: str,
    flags: Sequence[str],
    chunk: int | None = None,
) -> str:
    """All that the planner prints for a model that it accepts.

    Raises:
        DoesNotFitError: no split fits.
    """
    found, impossible = plans(model, profile, gpus, workload, chunk)
    if not found:
        raise DoesNotFitError("\n".join(["no way to run this model on these GPUs:", *impossible]))
    best, reasons = verdict(found, workload, goal)
    lines = [
        f"{model.architecture}, {model.checkpoint.total / 1e9:,.1f} GB of weights, {gpus} x {profile.hardware.name}.",
        f"Predicted, for {workload.prompt:,} tokens in and {workload.output:,} out:",
        "",
        table(found, best),
        *([""] if impossible else []),
        *(f"not possible: {line}" for line in impossible),
        "",
        f"Recommended ({goal}: {GOALS[goal]}): {best.name}",
        "  " + best.command(model_path, flags),
        *(f"  {reason}" for reason in reasons),
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m sgl_shift.plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", required=True, help="a folder with a config.json, or such a file")
    parser.add_argument("--gpu", required=True, help=f"{', '.join(GPUS)}, or a JSON file of a machine (hardware.py)")
    parser.add_argument("--num-gpus", type=int, required=True)
    parser.add_argument("--trace", type=Path, help="Azure LLM inference 2023 (.csv) or Mooncake (.jsonl)")
    parser.add_argument("--trace-seconds", type=float, default=900.0, help="of the trace, from its start (default 900)")
    parser.add_argument("--trace-rate", type=float, default=1.0, help="factor on the trace's arrival rate")
    parser.add_argument("--input-len", type=int, default=4096, help="of a typical request (default 4096)")
    parser.add_argument("--output-len", type=int, default=250, help="of a typical request (default 250)")
    parser.add_argument(
        "--goal", choices=GOALS, default="balanced", help="; ".join(f"{k}: {v}" for k, v in GOALS.items())
    )
    parser.add_argument("--quantization", choices=["fp8"], help="as for SGLang: quantize while loading")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "fp8_e4m3", "fp8_e5m2"], default="auto")
    parser.add_argument("--chunked-prefill-size", type=int, help="default: SGLang's for this GPU")
    parser.add_argument("--shift-allow-untested-model", action="store_true")
    given = parser.parse_args(argv)
    if min(given.num_gpus, given.input_len, given.output_len) < 1 or given.trace_rate <= 0:
        parser.error("--num-gpus, --input-len, --output-len and --trace-rate are above 0")
    flags = [f"--quantization {given.quantization}"] if given.quantization else []
    flags += [f"--kv-cache-dtype {given.kv_cache_dtype}"] if given.kv_cache_dtype != "auto" else []
    flags += ["--shift-allow-untested-model"] if given.shift_allow_untested_model else []
    try:
        fp8_kv = given.kv_cache_dtype != "auto"
        model = ModelShape.from_path(Path(given.model_path), fp8=given.quantization == "fp8", fp8_kv=fp8_kv)
        profile = Profile.named(given.gpu)
        refused = support.refuse_architecture(
            model.architecture, is_mla=model.mla, allow_untested=given.shift_allow_untested_model
        )
        if refused:
            raise support.RefusedError(refused)
        scale = Scale(time=1 / given.trace_rate, seconds=given.trace_seconds)
        workload = Workload(given.input_len, given.output_len, load(given.trace, scale) if given.trace else ())
        print(
            report(
                model,
                profile,
                given.num_gpus,
                workload,
                given.goal,
                given.model_path,
                flags,
                given.chunked_prefill_size,
            )
        )
    except (ShapeError, TraceError, support.RefusedError, ValueError) as error:
        print(f"PROBLEM: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
