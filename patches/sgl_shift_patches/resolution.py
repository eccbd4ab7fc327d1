"""Refusals, in the launcher, with SGLang's arguments resolved and before any process starts or weight loads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any

from sgl_shift import support
from sgl_shift.layout import HeadLayout, Layout, LayoutError
from sgl_shift.support import RefusedError
from sgl_shift_patches import cli, registry

logger = logging.getLogger(__name__)

# The last step of arg_groups/pipeline.py: graph sizes, backends, loaders and parallel degrees are final there.
STEP = "validate_deepep_v2_dispatch_token_budget"


def register() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook(STEP)(resolve)


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    previous(server_args)
    shift = cli.config_of(server_args)
    if not shift.enabled:
        return
    registry.verify(registry.DOORS)
    refuse_unsupported(server_args)
    limit_prefill_graphs(server_args, shift.settings.threshold)
    registry.install(registry.LAUNCHER)
    # Arguments that were made without our doors take the environment's configuration along into the ranks.
    cli._attach(server_args, shift)


def refuse_unsupported(server_args: Any) -> None:
    """Raise :class:`RefusedError` with everything about this deployment that Shift Parallelism cannot serve."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import AttentionArch

    shift = cli.config_of(server_args)
    arguments = resolving_view(server_args)
    problems = support.refusals(arguments)
    if problem := two_nccl_wheels():
        problems.append(problem)
    if arguments.cuda_graph_config is not None and arguments.cuda_graph_config.prefill.backend == "full":
        problems.append("--cuda-graph-backend-prefill full: it captures the switch itself; use breakable or disabled")

    model = model_config_of(server_args)
    if architecture_problem := support.refuse_architecture(
        model.hf_config.architectures[0],
        is_mla=model.attention_arch == AttentionArch.MLA,
        allow_untested=shift.allow_untested_model,
    ):
        problems.append(architecture_problem)
    else:
        try:
            layout = Layout(arguments.tp_size, shift.sp_size)
            HeadLayout(layout, model.num_attention_heads, model.get_total_num_kv_heads())
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


def limit_prefill_graphs(server_args: Any, threshold: int) -> None:
    """Keep only prefill graph buckets that hold stock TP: larger batches must reach the decision, hence run eagerly."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Phase, with_phase

    graphs = resolving_view(server_args).cuda_graph_config
    if graphs is None or graphs.prefill.backend == "disabled" or not graphs.prefill.bs:
        return
    if max(graphs.prefill.bs) <= threshold:
        return
    kept = [size for size in graphs.prefill.bs if size <= threshold]
    changes = {"bs": kept, "max_bs": kept[-1]} if kept else {"backend": "disabled", "bs": None, "max_bs": None}
    declare_resolution(server_args, "sgl_shift", cuda_graph_config=with_phase(graphs, Phase.PREFILL, **changes))
    logger.info("Shift Parallelism: prefill CUDA graphs up to %s tokens; larger prefills choose per batch", kept[-1:])
