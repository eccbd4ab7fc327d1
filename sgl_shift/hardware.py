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
    all others are taken from their source before that fit. Latencies are of one collective of few bytes.

    Attributes:
        gemm, attention: parts of the peak FLOPs; ``moe_gemm`` is a part of ``gemm``, for grouped GEMMs.
        memory, link: parts of the peak bytes/s.
        all_reduce_latency, exchange_latency: seconds.
        step, layer, eager_layer, sequence, request: seconds of overhead a forward pass; a layer of it; a layer launched
            outside of a CUDA graph, if the GPU does not take longer; a running request of it; a request, once.
    """

    # Fitted; rounded.
    gemm: float = 0.587
    memory: float = 0.895
    link: float = 0.725
    all_reduce_latency: float = 14.7e-6
    exchange_latency: float = 69.4e-6
    step: float = 2.81e-3
    sequence: float = 48.5e-6
    request: float = 12.9e-3
    # Taken from elsewhere, or assumed.
    attention: float = 0.65  # FlashAttention-3 (arXiv 2407.08608): forward, causal, head dim 128, 16K, about 640 TFLOPS
    moe_gemm: float = 0.7  # assumed: grouped GEMMs have few rows an expert
    layer: float = 30e-6  # assumed: in a CUDA graph, some 15 kernels of a layer start 2 us after one another
    eager_layer: float = 100e-6  # assumed

    FITTED = ("gemm", "memory", "link", "all_reduce_latency", "exchange_latency", "step", "sequence", "request")


# A CPU with PyTorch and gloo. The rates of :func:`cpu` were measured, so all of them is reached; the rest is assumed.
ON_CPU = Efficiency(
    gemm=1.0,
    memory=1.0,
    link=1.0,
    attention=80 / 150,  # measured: scaled_dot_product_attention, causal, 1,024 tokens, float32
    moe_gemm=1.0,
    all_reduce_latency=0.3e-3,
    exchange_latency=0.3e-3,
    layer=0.0,
    eager_layer=0.0,
    step=10e-3,
    sequence=0.0,
    request=10e-3,
)


def cpu(ranks: int, link: float, cores: int = 2) -> Hardware:
    """One rank's share of the machine that the project is tested on (Intel Xeon with AVX-512, 2 cores, 24 GiB).

    Measured on it, one thread, PyTorch, float32: 150 GFLOP/s in GEMMs of 512 to 1,024 rows, 14.7 GB/s in GEMVs.

    Args:
        link: bytes/s that a rank can send, for instance the rate that ``tc`` was given.
    """
    share = cores / ranks
    return Hardware("cpu", 24 * 1024 * MIB / ranks, 14.7e9 * share, 150e9 * share, 150e9 * share, link)


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
        known = f"{name!r} is not one of {', '.join(GPUS)}, nor a JSON file of a machine"
        try:
            values = json.loads(Path(name).read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{known} ({error})") from None
        efficiency = values.pop("efficiency", {})
        wrong = set(values) ^ {f.name for f in fields(Hardware)} | set(efficiency) - {
            f.name for f in fields(Efficiency)
        }
        if wrong:
            raise ValueError(f"{known} (unknown or missing there: {', '.join(sorted(wrong))})")
        return cls(Hardware(**values), Efficiency(**efficiency))
