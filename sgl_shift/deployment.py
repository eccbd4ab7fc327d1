"""What the simulator runs: replicas of one model, each with a scheduler and a KV budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sgl_shift.config import Settings
from sgl_shift.cost import StepCost
from sgl_shift.hardware import Hardware, Profile
from sgl_shift.layout import Layout
from sgl_shift.shape import ModelShape


@dataclass(frozen=True)
class Scheduler:
    """How an engine forms batches.

    Attributes:
        step_tokens: SGLang's ``--chunked-prefill-size``, vLLM's ``--max-num-batched-tokens``.
        max_running: requests in a replica's batch at most.
        prefix_cache: whether prompt blocks of earlier requests are kept and reused.
        balance: how requests are dealt to replicas.
    """

    kind: Literal["sglang", "vllm"] = "sglang"
    step_tokens: int = 8192
    max_running: int = 2048
    prefix_cache: bool = True
    balance: Literal["round_robin", "least_loaded"] = "round_robin"


DEFAULTS, SGLANG = Settings(), Scheduler()


@dataclass(frozen=True)
class Deployment:
    """Replicas of one model.

    Attributes:
        shift: the step cost in full TP, of one replica.
        base: that of the base configuration; None without Shift Parallelism.
        settings: threshold and mode (``shift`` or ``sp``), as on a server.
        kv_tokens: room in the KV cache of one replica.
    """

    name: str
    shift: StepCost
    kv_tokens: int
    base: StepCost | None = None
    settings: Settings = DEFAULTS
    replicas: int = 1
    scheduler: Scheduler = SGLANG

    @classmethod
    def of(
        cls,
        name: str,
        model: ModelShape,
        profile: Profile,
        layout: Layout,
        usable: float,
        *,
        settings: Settings = DEFAULTS,
        replicas: int = 1,
        scheduler: Scheduler = SGLANG,
        weights: float | None = None,
    ) -> Deployment:
        """A deployment whose KV cache takes what the weights leave.

        Args:
            layout: of one replica; with SP=1 it is plain TP.
            usable: bytes of a device for weights and KV cache.
            weights: of which the weights take so many; None: as many as here (docs/weights.md).

        Raises:
            LayoutError: heads that cannot be split so.
            DoesNotFitError: the weights leave no room.
        """
        # SGLang captures prefill graphs of up to 8,192 tokens, vLLM graphs of 512 rows.
        vllm = scheduler.kind == "vllm"
        base_graphs, shift_graphs = (512 * layout.sp_size, 512) if vllm else (8192, 8192)
        base = StepCost(model, profile, layout, base_graphs) if layout.sp_size > 1 else None
        shift = StepCost(model, profile, Layout(layout.world_size, 1), shift_graphs)
        weights = weights_of(model, layout, profile.hardware) if weights is None else weights
        room = int((usable - weights) / shift.kv_bytes)
        if room <= 0:
            raise DoesNotFitError(
                f"weights take {weights / 1e9:,.1f} GB a GPU, {usable / 1e9:,.1f} GB are there for weights and KV cache"
            )
        return cls(name, shift, room, base, settings, replicas, scheduler)


class DoesNotFitError(ValueError):
    """Weights that leave no room for a KV cache."""


def weights_of(model: ModelShape, layout: Layout, hardware: Hardware) -> float:
    """Bytes of weights on one GPU, of all configurations that are loaded (docs/weights.md)."""
    checkpoint = model.checkpoint
    if layout.sp_size == 1:
        return checkpoint.total / layout.tp_size
    if model.fp8 and hardware.fp8_flops == hardware.flops:  # no FP8 units: repacked for Marlin, in each configuration
        checkpoint = checkpoint._replace(dtypes=frozenset({"repacked"}))
    return checkpoint.together(layout.world_size, layout.tp_size, gpu=True)
