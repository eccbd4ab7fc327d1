"""The planner's answers for the models of :mod:`benchmarks.models` on some machines: ``python -m benchmarks.plans``.

Writes ``benchmarks/results/plans-DATE.md``, all that the planner prints, and prints the summary in ``docs/results.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from pathlib import Path

from benchmarks.models import CONFIGS
from benchmarks.validate import RESULTS, TRACES
from sgl_shift.hardware import GPUS, Profile
from sgl_shift.plan import Plan, Workload, plans, report, verdict
from sgl_shift.shape import ModelShape
from sgl_shift.traces import Request, Scale, load

MODELS = ("Llama-70B FP8", "Qwen3-32B FP8", "Qwen3-30B-A3B", "Llama-4-Scout")
MACHINES = (("h200", 8), ("h100", 8), ("a100", 4))
# Model, FP8 KV cache, machine, trace: the two of the paper's figures 9 and 10.
TRACED = (
    ("Llama-70B FP8", False, ("h200", 8), "azure_code_2023.csv"),
    ("Qwen3-32B FP8", True, ("h200", 8), "mooncake_conversation_15min.jsonl"),
)


def answer(name: str, gpu: str, gpus: int, *, fp8_kv: bool = False, trace: Sequence[Request] = ()) -> str:
    """What the planner prints."""
    model = ModelShape.from_config(CONFIGS[name], fp8_kv=fp8_kv)
    flags = ["--kv-cache-dtype fp8_e4m3"] if fp8_kv else []
    path = name.replace(" ", "-")
    return report(model, Profile(GPUS[gpu]), gpus, Workload(4096, 250, trace), "balanced", path, flags)


def summary() -> str:
    """A Markdown table: a line for each model and machine."""
    lines = [
        "| model | GPUs | recommended | threshold | TTFT ms | TPOT ms | tok/s | TP: TTFT, tok/s | most tok/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        for gpu, gpus in MACHINES:
            workload = Workload(4096, 250)
            found, _ = plans(ModelShape.from_config(CONFIGS[name]), Profile(GPUS[gpu]), gpus, workload)
            best, _ = verdict(found, workload, "balanced")
            tp = next(plan for plan in found if not plan.is_shift and plan.layout.world_size == gpus)
            fastest = max(found, key=lambda plan: plan.throughput)
            threshold = best.deployment.settings.threshold if best.is_shift else ""
            lines.append(
                f"| {name} | {gpus} {gpu.upper()} | {best.name} | {threshold} | {_ms(best)} | {best.throughput:,.0f} | "
                f"{1e3 * tp.ttft:,.0f}, {tp.throughput:,.0f} | {fastest.throughput:,.0f} ({fastest.name}) |"
            )
    return "\n".join(lines)


def _ms(plan: Plan) -> str:
    return f"{1e3 * plan.ttft:,.0f} | {1e3 * plan.tpot:.1f}"


def main() -> None:
    parts = [
        "# Predicted: the planner's answers",
        "",
        "Written by `python -m benchmarks.plans`; nothing here was measured.",
    ]
    for name in MODELS:
        for gpu, gpus in MACHINES:
            parts += ["", f"## {name}, {gpus} {gpu.upper()}", "", "```", answer(name, gpu, gpus), "```"]
    for name, fp8_kv, (gpu, gpus), trace in TRACED:
        requests = load(TRACES / trace, Scale(seconds=900))
        text = answer(name, gpu, gpus, fp8_kv=fp8_kv, trace=requests)
        parts += [
            "",
            f"## {name}, {gpus} {gpu.upper()}, under 15 minutes of {Path(trace).stem}",
            "",
            "```",
            text,
            "```",
        ]
    (RESULTS / f"plans-{date.today()}.md").write_text("\n".join(parts) + "\n")
    print(summary())


if __name__ == "__main__":
    main()
