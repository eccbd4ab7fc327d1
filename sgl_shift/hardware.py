"""What machines can do (data sheets), and how much of that an engine reaches (parameters of the cost model).

Every number says where it is from. Nothing here was fitted to a workload of its own; the fitted ones were fitted once,
on one published table (``python -m benchmarks.validate --fit``), and are checked against all others.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path

MIB = 1024**2


@dataclass(frozen=True)
class Hardware:
    """One accelerator (or one rank's share of a CPU) and its link to the others.

    Attributes:
        memory: bytes, as SGLang sees them (``nvidia-smi``).
        bandwidth: of that memory, bytes/s.
        flops: dense 16-bit (CPU: float32) multiply-adds, counted as two, per second.
        fp8_flops: the same for FP8; equal to ``flops`` where there are no FP8 tensor cores.
        link: bytes/s that one device can send, in one direction.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    fp8_flops: float
    link: float


# Data sheets of NVIDIA (SXM modules, dense rates; NVLink in one direction is half of the figure on the sheet).
GPUS: dict[str, Hardware] = {
    gpu.name: gpu
    for gpu in (
        Hardware("a100", 81920 * MIB, 2.039e12, 312e12, 312e12, 300e9),
        Hardware("h100", 81559 * MIB, 3.35e12, 989.4e12, 1979e12, 450e9),
        Hardware("h200", 143771 * MIB, 4.8e12, 989.4e12, 1979e12, 450e9),
        Hardware("b200", 183359 * MIB, 7.7e12, 2250e12, 4500e12, 900e9),
    )
}


@dataclass(frozen=True)
class Efficiency:
    """How much of a machine an engine reaches. Defaults: CUDA, NVLink, one node.

    *Fitted* parameters are fitted to the table of section 2.3 of the paper notes (Llama-70B FP8 on 8 H200, 10 numbers),
    all others are taken from their source before that fit.
    """

    # Fitted.
    gemm: float = 0.587
    memory: float = 0.895
    link: float = 0.725
    all_reduce_latency: float = 14.7e-6
    exchange_latency: float = 69.4e-6
    step: float = 2.81e-3
    # Taken from elsewhere.
    attention: float = 0.65  # FlashAttention-3 (arXiv 2407.08608), figure 5: causal, head dim 128, 16K: 640 of 989 TFLOPS
    moe_gemm: float = 0.7  # of ``gemm``: grouped GEMMs have few rows an expert; assumed
    layer: float = 30e-6  # s: some 15 kernels of a layer start 2 us after one another inside a CUDA graph; assumed
    eager_layer: float = 100e-6  # s: host time to launch a layer outside of a graph; assumed
    sequence: float = 48.5e-6  # s: host work for each running request and step
    request: float = 12.9e-3  # s: HTTP, tokenizer and scheduling of one request until it can run; assumed

    FITTED = ("gemm", "memory", "link", "all_reduce_latency", "exchange_latency", "step", "sequence", "request")


@dataclass(frozen=True)
class Profile:
    """A machine with what is reached of it."""

    hardware: Hardware
    efficiency: Efficiency = field(default_factory=Efficiency)

    @classmethod
    def named(cls, name: str) -> Profile:
        """A known GPU, or a JSON file ``{"name": .., "memory": .., .., "efficiency": {..}}`` with the fields above.

        Raises:
            ValueError: neither.
        """
        if name.lower() in GPUS:
            return cls(GPUS[name.lower()])
        known = f"--gpu {name}: not one of {', '.join(GPUS)}, nor a JSON file of a machine"
        try:
            values = json.loads(Path(name).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{known} ({error})") from None
        efficiency = values.pop("efficiency", {})
        wrong = set(values) ^ {f.name for f in fields(Hardware)} | set(efficiency) - {f.name for f in fields(Efficiency)}
        if wrong:
            raise ValueError(f"{known} (unknown or missing there: {', '.join(sorted(wrong))})")
        return cls(Hardware(**values), Efficiency(**efficiency))
