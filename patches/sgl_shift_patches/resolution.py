"""Refusals, in the launcher, with SGLang's arguments resolved and before any process starts or weight loads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

from sgl_shift import support
from sgl_shift.config import ShiftConfig, switched_on
from sgl_shift.layout import HeadLayout, Layout, LayoutError
from sgl_shift.policy import choose
from sgl_shift.support import RefusedError
from sgl_shift_patches import cli, control, fingerprints, registry

logger = logging.getLogger(__name__)

# The last step of arg_groups/pipeline.py: graph sizes, backends, loaders and parallel degrees are final there.
EAGER_VARIABLE = "SGL_SHIFT_EAGER_BASE_PREFILL"
STEP = "validate_deepep_v2_dispatch_token_budget"


def register() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_attention_backend_compatibility")(default_attention_backend)
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
        shift = plan_graphs(server_args, shift)
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
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: it reserves memory by the size of one model's prefill graphs; unset it"
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


def plan_graphs(server_args: Any, shift: ShiftConfig) -> ShiftConfig:
    """What CUDA graphs will hold: each the configuration that its padded tokens select.

    Returns:
        ``shift`` with a threshold that is a size of the decode graphs, where it lies between two of them: 249 requests
        are padded to 256, and must not run in the base configuration under a threshold of 250.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase

    arguments = resolving_view(server_args)
    graphs = arguments.cuda_graph_config
    if graphs is None:
        return shift
    if shift.auto:  # sizes of graphs are what will be measured
        if switched_on(EAGER_VARIABLE):
            raise RefusedError(
                f"{EAGER_VARIABLE}: it limits prefill graphs to the threshold, which --shift-threshold auto measures "
                "later; give a number, or unset it"
            )
        return shift
    threshold = shift.settings.threshold
    if graphs.decode.backend != "disabled" and graphs.decode.bs and shift.settings.mode == "shift":
        width = _decode_width(arguments)
        sizes = [size * width for size in graphs.decode.bs]
        snapped = min((size for size in sizes if size >= threshold), default=threshold)
        if snapped != threshold and threshold > min(sizes):
            logger.info(
                "Shift Parallelism: threshold %d is now %d, the size of the decode graph that it is in",
                threshold,
                snapped,
            )
            shift = replace(shift, settings=shift.settings.updated(threshold=snapped))
    largest = shift.settings.threshold if shift.settings.mode == "shift" else 0
    now = graphs.prefill
    if switched_on(EAGER_VARIABLE) and now.backend != "disabled" and now.bs and max(now.bs) > largest:
        kept = [size for size in now.bs if size <= largest]
        changes = {"bs": kept, "max_bs": kept[-1]} if kept else {"backend": "disabled"}
        declare_resolution(server_args, "sgl_shift", cuda_graph_config=with_phase(graphs, Phase.PREFILL, **changes))
        logger.info("Shift Parallelism: prefill graphs up to %d tokens; larger batches run eagerly", (kept or [0])[-1])
    return shift


def _decode_width(arguments: Any) -> int:
    """Tokens of a request in a decode graph."""
    return int(arguments.speculative_num_draft_tokens or 1)


def captured_graphs(server_args: Any, shift: ShiftConfig) -> list[str]:
    """The tokens of the graphs that will be captured, and in which configuration; for people."""
    from sglang.srt.arg_groups.overrides import resolving_view

    arguments = resolving_view(server_args)
    graphs = arguments.cuda_graph_config
    lines: list[str] = []
    for kind in ("decode", "prefill"):
        now = getattr(graphs, kind, None)
        if now is None or now.backend == "disabled" or not now.bs:
            continue
        width = _decode_width(arguments) if kind == "decode" else 1
        held: dict[str, list[int]] = {}
        for size in now.bs:
            able = shift.loads_base and not arguments.enable_lora
            configuration: str = choose(shift.settings, size * width, base_can_run=able)
            if shift.auto and able and shift.settings.mode == "shift":
                configuration = "as measured before"
            held.setdefault(configuration, []).append(size * width)
        lines += [
            f"{kind}, {min(sizes)} to {max(sizes)} tokens: {configuration}" for configuration, sizes in held.items()
        ]
    return lines


def default_attention_backend(server_args: Any, previous: Callable[[Any], None]) -> None:
    """FlashInfer, where the user and SGLang's table of models name none."""
    from sglang.srt.arg_groups.model_override_base import is_attention_backend_not_set
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.utils import is_cuda

    if (
        cli.config_of(server_args).loads_base
        and is_cuda()
        and is_attention_backend_not_set(resolving_view(server_args))
    ):
        declare_resolution(server_args, "sgl_shift", attention_backend="flashinfer")
        logger.info("Shift Parallelism: attention backend not specified, flashinfer is used")
    previous(server_args)
