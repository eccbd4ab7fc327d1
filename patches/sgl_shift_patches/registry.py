"""Every hook into SGLang, in one table, and the check that each took hold.

SGLang only logs a plugin or a hook that fails and then serves plain TP, so nothing here is taken on trust: after
installing, :func:`verify` looks at each target again and refuses to go on if one is not hooked.

Hooks come in sets. ``DOORS`` are in every process that has the plugin and do nothing until ``--sp-size`` asks for
more than 1; ``LAUNCHER`` and ``RANK`` are installed only then, in the launching process and in each scheduler, ``HTTP``
in each process that answers HTTP requests, ``GRPC`` with ``--smg-grpc-mode``.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from typing import Any, NamedTuple

from sgl_shift_patches import (
    autotune,
    cli,
    control,
    fused_kernels,
    groups,
    launcher,
    model_runner,
    observability,
    weight_updater,
)

SGLANG_VERSION = "0.5.23"  # the release that the hooks were written against


class HookError(RuntimeError):
    """A hook into SGLang that did not take hold. Serving without it would give plain TP, or wrong answers."""


class Hook(NamedTuple):
    target: str  # dotted path of SGLang's function
    kind: str  # HookType: "after" sees the result, "around" wraps the call
    function: Callable[..., Any]
    why: str


_SRT = "sglang.srt"

DOORS: tuple[Hook, ...] = (
    Hook(f"{_SRT}.server_args.ServerArgs.add_cli_args", "after", cli.add_cli_args, "the flags"),
    Hook(f"{_SRT}.server_args.ServerArgs.from_cli_args", "around", cli.from_cli_args, "keeps what the flags said"),
    Hook(
        f"{_SRT}.distributed.bootstrap.init_parallel_runtime",
        "after",
        groups.init_parallel_runtime,
        "first call of a rank that has the arguments: installs RANK, meets the other ranks, makes the groups",
    ),
    Hook(
        f"{_SRT}.managers.data_parallel_controller.DataParallelController.get_init_info",
        "after",
        launcher.controller_init_info,
        "hands the ranks' configuration on to the launcher",
    ),
)

HTTP: tuple[Hook, ...] = (
    Hook(
        f"{_SRT}.managers.io_struct.SetInternalStateReq.__get_pydantic_core_schema__",
        "around",
        control.request_schema,
        "lets POST /set_internal_state name the mode",
    ),
)

LAUNCHER: tuple[Hook, ...] = (
    Hook(
        f"{_SRT}.entrypoints.engine.Engine._launch_scheduler_processes",
        "around",
        launcher.launch_scheduler_processes,
        "no server starts unless every rank came up with the same configuration",
    ),
    *HTTP,
)

GRPC: tuple[Hook, ...] = (
    Hook(
        "smg_grpc_servicer.sglang.scheduler_launcher._start_scheduler_processes",
        "around",
        launcher.start_smg_schedulers,
        "no gRPC server starts unless its ranks came up with the same configuration",
    ),
)

RANK: tuple[Hook, ...] = (
    Hook(
        f"{_SRT}.model_executor.model_runner.ModelRunner.load_model",
        "around",
        model_runner.load_model,
        "loads the base model beside the stock one and puts the decision in front of both",
    ),
    Hook(
        f"{_SRT}.model_loader.loader.DefaultModelLoader.load_weights_only",
        "after",
        model_runner.gather_as_loaded,
        "quantized weights are gathered for the base model before they are processed",
    ),
    Hook(
        f"{_SRT}.model_executor.model_runner.ModelRunner.init_attention_backends",
        "after",
        model_runner.mirror_aux_capture,
        "EAGLE3 and captures without a draft read hidden states of inner layers",
    ),
    Hook(
        f"{_SRT}.distributed.parallel_state.graph_capture",
        "around",
        groups.graph_capture,
        "collectives of the base configuration are captured with PyNccl and custom all-reduce",
    ),
    *(
        Hook(
            f"{_SRT}.model_executor.runner.{target}",
            "around",
            model_runner.in_both_configurations,
            "kernels are tuned for the GEMMs of both configurations",
        )
        for target in (
            "base_runner.BaseRunner._flashinfer_autotune",
            "flashinfer_autotune.maybe_flashinfer_autotune_extend",
        )
    ),
    Hook(
        f"{_SRT}.model_executor.runner.eager_runner.EagerRunner.__init__",
        "after",
        autotune.at_startup,
        "--shift-threshold auto measures before graphs are captured",
    ),
    Hook(
        f"{_SRT}.model_executor.model_runner.ModelRunner.init_cuda_graphs",
        "after",
        model_runner.warm_up_base,
        "compiles the kernels of the base configuration before requests come",
    ),
    Hook(
        f"{_SRT}.model_executor.model_runner.ModelRunner.forward",
        "around",
        model_runner.forward,
        "counts batches that a CUDA graph replays without running any Python of the model",
    ),
    Hook(
        f"{_SRT}.model_executor.model_runner.ModelRunner.alloc_memory_pool",
        "around",
        observability.alloc_memory_pool,
        "logs the KV tokens that fit beside the weights, or what takes the room",
    ),
    Hook(
        f"{_SRT}.models.utils.enable_fused_set_kv_buffer",
        "around",
        fused_kernels.enable_fused_set_kv_buffer,
        "a kernel that writes KV before the exchange would write another rank's heads",
    ),
    Hook(
        f"{_SRT}.layers.layer_boundary.residual.add_norm.flashinfer_ar_fusion_applies",
        "around",
        fused_kernels.flashinfer_ar_fusion_applies,
        "its one workspace belongs to the stock TP group",
    ),
    Hook(
        f"{_SRT}.managers.scheduler.Scheduler.run_batch",
        "around",
        observability.run_batch,
        "marks each result with the configuration that ran it",
    ),
    *(
        Hook(f"{_SRT}.{target}", "around", observability.process_batch_result, "shows the configuration in batch lines")
        for target in (
            "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
            ".process_batch_result_prefill",
            "managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
            ".process_batch_result_decode",
            "managers.scheduler.Scheduler.process_batch_result_disagg_prefill",
        )
    ),
    Hook(
        f"{_SRT}.managers.scheduler.Scheduler.get_init_info",
        "after",
        launcher.scheduler_init_info,
        "tells the launcher what this rank came up with",
    ),
    Hook(
        f"{_SRT}.managers.scheduler_components.internal_state.SchedulerInternalStateController.get_internal_state",
        "after",
        observability.get_internal_state,
        "/server_info",
    ),
    Hook(
        f"{_SRT}.managers.scheduler_components.internal_state.SchedulerInternalStateController._update_handlers",
        "after",
        control.update_handlers,
        "/set_internal_state",
    ),
    *(
        Hook(
            f"{_SRT}.model_executor.model_runner_components.weight_updater.WeightUpdater.{method}",
            "around",
            weight_updater.refuse,
            "where the base model has weights of its own, it would change those of one configuration only",
        )
        for method in (
            "init_weights_update_group",
            "update_weights_from_disk",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
        )
    ),
    Hook(
        f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.begin_weight_update",
        "around",
        weight_updater.refuse_session,
        "weights can also be written from outside between begin and end",
    ),
    *(
        Hook(
            f"{_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.{method}",
            "after",
            weight_updater.gather,
            "brings new weights to the base configuration",
        )
        for method in ("update_weights_from_disk", "update_weights_from_ipc", "end_weight_update")
    ),
    *(
        Hook(
            f"{_SRT}.managers.scheduler_components.weight_updater.{target}",
            "around",
            function,
            "buffers of the base model outlive a release of the weights' memory",
        )
        for target, function in (
            ("_export_static_state", weight_updater.export_static_state),
            ("_import_static_state", weight_updater.import_static_state),
        )
    ),
    Hook(
        f"{_SRT}.model_executor.model_runner.ModelRunner.check_weights",
        "around",
        weight_updater.check_weights,
        "one of its actions overwrites weights",
    ),
)


ALL: tuple[Hook, ...] = DOORS + LAUNCHER + RANK


def register(hooks: Iterable[Hook]) -> None:
    """Hand ``hooks`` to SGLang; they take effect with its next ``HookRegistry.apply_hooks()``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def install(hooks: Iterable[Hook]) -> None:
    """Register ``hooks`` that are not yet installed, apply them and verify that they took hold.

    Raises:
        HookError: naming each hook that did not.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = tuple(hooks)
    missing = [hook for hook in hooks if not _takes_hold(hook)]
    # SGLang applies a target's hooks once. Where another plugin was first, ours goes on top of its wrapper.
    late = [hook for hook in missing if hook.target in HookRegistry._patched]
    register(hook for hook in missing if hook not in late)
    HookRegistry.apply_hooks()
    for hook in late:
        HookRegistry._apply_target(hook.target, [(HookType(hook.kind), hook.function, None)])
    verify(hooks)


def verify(hooks: Iterable[Hook]) -> None:
    """Raise :class:`HookError` unless SGLang is the right release and every hook is in place."""
    found = metadata.version("sglang")
    if found != SGLANG_VERSION:
        raise HookError(
            f"sgl-shift was written for SGLang {SGLANG_VERSION}, this is {found}; "
            f"install sglang=={SGLANG_VERSION}, or start without --sp-size"
        )
    missing = [hook for hook in hooks if not _takes_hold(hook)]
    if missing:
        lines = "".join(f"\n  {hook.target}: {hook.why}" for hook in missing)
        raise HookError(f"Shift Parallelism is not in place; these hooks into SGLang did not take hold:{lines}")


def _takes_hold(hook: Hook) -> bool:
    """Whether our function is among the wrappers around the target now; a name may also be another plugin's."""
    try:
        return any(function is hook.function for function in _wrapped_around(pkgutil.resolve_name(hook.target)))
    except (AttributeError, ImportError):  # the target does not exist in this SGLang
        return False


def _wrapped_around(function: Any) -> Iterator[Any]:
    """What the wrappers of ``HookRegistry`` around a function hold, outermost first."""
    while hasattr(function, "__wrapped__"):
        function = getattr(function, "__func__", function)  # a class method comes bound
        yield from (cell.cell_contents for cell in function.__closure__ or ())
        function = function.__wrapped__
