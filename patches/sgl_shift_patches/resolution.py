"""Refusals, in the launcher, with SGLang's arguments resolved and before any process starts or weight loads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any

from sgl_shift import support
from sgl_shift.config import ShiftConfig
from sgl_shift.layout import HeadLayout, Layout, LayoutError
from sgl_shift.support import RefusedError
from sgl_shift_patches import cli, control, fingerprints, registry

logger = logging.getLogger(__name__)

# The last step of arg_groups/pipeline.py: graph sizes, backends, loaders and parallel degrees are final there.
STEP = "validate_deepep_v2_dispatch_token_budget"


def register() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook(STEP)(resolve)


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    previous(server_args)
    shift = cli.config_of(server_args)
    if not shift.enabled:
        return
    registry.verify(registry.DOORS)
    fingerprints.verify()
    refuse_unsupported(server_args, shift)
    if shift.loads_base:
        warn_about_nodes(server_args, shift)
        limit_graphs(server_args, shift)
    registry.install(registry.LAUNCHER + (registry.GRPC if resolving_view(server_args).smg_grpc_mode else ()))
    control.name_app_for_workers()
    cli.mark_checked(server_args, shift)


def refuse_unsupported(server_args: Any, shift: ShiftConfig) -> None:
    """Raise :class:`RefusedError` with everything about this deployment that Shift Parallelism cannot serve.

    With ``--shift-mode tp`` no base model exists and all is stock, so only the degrees have to make sense.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import AttentionArch

    arguments, model = resolving_view(server_args), model_config_of(server_args)
    problems: list[str] = []
    unsuitable = support.refuse_architecture(
        model.hf_config.architectures[0],
        is_mla=model.attention_arch == AttentionArch.MLA,
        allow_untested=shift.allow_untested_model,
    )
    if shift.loads_base:
        problems += support.refusals(arguments)
        problems += filter(None, (unsuitable, two_nccl_wheels(), post_capture_sizing()))
        graphs = arguments.cuda_graph_config
        if graphs is not None and graphs.prefill.backend == "full":
            problems.append("--cuda-graph-backend-prefill full: it captures the switch; use breakable or disabled")
    if not unsuitable or not shift.loads_base:
        try:
            HeadLayout(
                Layout(arguments.tp_size, shift.sp_size), model.num_attention_heads, model.get_total_num_kv_heads()
            )
        except LayoutError as error:
            problems.append(str(error))
    if problems:
        lines = "".join(f"\n  * {problem}" for problem in problems)
        raise RefusedError(f"Shift Parallelism (--sp-size {shift.sp_size}) cannot serve this deployment:{lines}")


def two_nccl_wheels() -> str | None:
    """The NCCL wheels for CUDA 12 and 13 install the same library path; with both, either may be loaded."""
    try:
        found = {name: metadata.version(name) for name in ("nvidia-nccl-cu12", "nvidia-nccl-cu13")}
    except metadata.PackageNotFoundError:
        return None
    both = " and ".join(f"{name} {version}" for name, version in found.items())
    return f"{both} are both installed and own the same libnccl.so.2; uninstall the one that torch was not built for"


def post_capture_sizing() -> str | None:
    from sglang.srt.environ import envs

    if not envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        return None
    return (
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: it reserves memory by the size of prefill graphs, limited here; unset it"
    )


def warn_about_nodes(server_args: Any, shift: ShiftConfig) -> None:
    """Base-TP groups are strided ranks: with more than one node, the base all-reduces are what crosses (paper, 1.8)."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    arguments, model = resolving_view(server_args), model_config_of(server_args)
    layout = Layout(arguments.tp_size, shift.sp_size)
    if not layout.base_tp_crosses(arguments.nnodes):
        return
    size, world, tp = model.dtype.itemsize, layout.world_size, layout.tp_size
    now = 4 * (tp - 1) / tp * model.hidden_size / layout.sp_size * size
    heads = 2 * model.num_attention_heads + 2 * max(model.get_total_num_kv_heads(), world)
    alone = (world - 1) / world * heads * model.head_dim / world * size
    logger.warning(
        "Shift Parallelism: with %d nodes, base-TP groups %s cross nodes. Each rank sends %.0f bytes a token and layer "
        "in all-reduces over the network; with --sp-size %d it would be %.0f in all-to-alls.",
        arguments.nnodes,
        layout.base_tp_groups,
        now,
        world,
        alone,
    )


def limit_graphs(server_args: Any, shift: ShiftConfig) -> None:
    """Keep the CUDA graph buckets that hold stock TP: what belongs in the base configuration must reach the decision.

    A graph replays what was captured, stock TP here, without asking. Batches above the largest bucket run eagerly.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase

    graphs = resolving_view(server_args).cuda_graph_config
    if graphs is None:
        return
    largest = shift.settings.threshold if shift.settings.mode == "shift" else 0
    for phase in (Phase.DECODE, Phase.PREFILL):
        now = getattr(graphs, phase)
        if now.backend == "disabled" or not now.bs or max(now.bs) <= largest:
            continue
        kept = [size for size in now.bs if size <= largest]
        changes = {"bs": kept, "max_bs": kept[-1]} if kept else {"backend": "disabled"}
        graphs = with_phase(graphs, phase, **changes)
        logger.info("Shift Parallelism: %s CUDA graphs up to %d; larger batches run eagerly", phase, (kept or [0])[-1])
    declare_resolution(server_args, "sgl_shift", cuda_graph_config=graphs)


def captured_tokens(server_args: Any) -> int:
    """The largest batch that a CUDA graph may replay as stock TP; 0 where nothing is captured."""
    from sglang.srt.arg_groups.overrides import resolving_view

    graphs = resolving_view(server_args).cuda_graph_config
    phases = () if graphs is None else (graphs.decode, graphs.prefill)
    return max((max(phase.bs) for phase in phases if phase.backend != "disabled" and phase.bs), default=0)
