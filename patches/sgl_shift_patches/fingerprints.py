"""What of SGLang's source the patches were written against, and the check that it is still so.

A hook that takes hold says nothing about the function under it: with another source it may do something else. So each
hooked function has a fingerprint in ``fingerprints.json``, and so has what the patches call or follow without hooking
it. ``python -m sgl_shift_patches.fingerprints`` prints that file anew; ``docs/porting.md`` says when.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import NamedTuple

from sgl_shift.config import switched_on
from sgl_shift_patches import registry
from sgl_shift_patches.sources import Tree

logger = logging.getLogger(__name__)

FILE = Path(__file__).with_name("fingerprints.json")
ALLOW_VARIABLE = "SGL_SHIFT_ALLOW_CHANGED_SGLANG"

_SRT = "sglang.srt"
_GROUP = f"{_SRT}.distributed.parallel_state"
_METRICS = f"{_SRT}.observability.metrics_collector"
_CONTROL = f"{_SRT}.managers.scheduler_components.internal_state"
_FP8 = f"{_SRT}.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_fp8"
_RUNNER = f"{_SRT}.model_executor"

# Not hooked, but called or followed: target -> what for.
RELIED_ON: dict[str, str] = {
    f"{_SRT}.plugins.load_plugins": "calls plugin.register in every process",
    f"{_SRT}.plugins.hook_registry.HookRegistry": "installs the hooks; registry.install knows how it marks targets",
    f"{_SRT}.arg_groups.resolution_hooks.register_resolution_hook": "resolution.register",
    f"{_SRT}.arg_groups.pipeline.run_resolution_pipeline": "resolution.STEP is its last step",
    f"{_SRT}.arg_groups.overrides.declare_resolution": "resolution.plan_graphs writes through it",
    f"{_SRT}.arg_groups.model_override_base.resolving_view": "reads resolved arguments",
    f"{_SRT}.arg_groups.model_override_base.model_config_of": "reads heads and architecture",
    f"{_SRT}.configs.model_config.AttentionArch": "tells MLA",
    f"{_SRT}.configs.model_config.ModelConfig.get_total_num_kv_heads": "KV heads before they are split",
    f"{_SRT}.server_args.ServerArgs.__reduce__": "carries the configuration to every scheduler",
    f"{_SRT}.server_args.prepare_server_args": "the doctor's and the launcher's way from flags to arguments",
    f"{_SRT}.entrypoints.engine.Engine.__init__": "loads plugins, then calls Engine.server_args_class",
    f"{_SRT}.entrypoints.engine.SchedulerInitResult": "launcher.launch_scheduler_processes wraps wait_for_ready",
    f"{_SRT}.managers.io_struct.SetInternalStateReq": "carries threshold and mode; numbers only",
    f"{_SRT}.managers.tokenizer_control_mixin.TokenizerControlMixin.set_internal_state": "engine.set_shift_parallel",
    f"{_CONTROL}.SchedulerInternalStateController.set_internal_state": "validates all keys, then applies",
    f"{_CONTROL}._UpdateHandler": "control.update_handlers makes one",
    f"{_CONTROL}.UpdateRejected": "how a handler refuses",
    f"{_SRT}.managers.io_struct.BeginWeightUpdateReqOutput": "weight_updater.refuse_session answers with one",
    f"{_SRT}.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_prefill_stats": "prints "
    "_graph_backend_label",
    f"{_SRT}.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter.report_decode_stats": "prints "
    "_graph_backend_label",
    f"{_SRT}.managers.scheduler.Scheduler.init_metrics_collector": "metrics.exporter: the context",
    f"{_METRICS}.SchedulerMetricsCollectorContext": "metrics.exporter: whether this rank reports",
    f"{_METRICS}.SchedulerMetricsCollector.init_new": "metrics.Metrics: the labels, which ranks report",
    f"{_METRICS}._StatLoggerDIMixin": "metrics.Metrics: classes that a deployment puts in place of Prometheus'",
    f"{_SRT}.utils.device_timer.DeviceTimer": "metrics.Metrics times steps on an accelerator with one",
    f"{_SRT}.observability.trace.get_global_tracing_enabled": "observability.trace_requests",
    f"{_SRT}.observability.trace.TraceReqContext.trace_event": "observability.trace_requests",
    f"{_SRT}.observability.req_time_stats.SchedulerReqTimeStats.set_last_decode_finish_time": "ends the span that "
    "observability.trace_requests puts an event into",
    f"{_GROUP}.patch_tensor_parallel_group": "groups.base_scope: scopes all that layers read but the MoE groups",
    f"{_GROUP}.init_model_parallel_group": "makes the SP and base-TP groups",
    f"{_GROUP}.initialize_model_parallel": "groups.make_groups takes local_rank as it does",
    f"{_GROUP}.get_world_group": "local_rank",
    f"{_GROUP}.GroupCoordinator._all_to_all_single": "the exchange",
    f"{_GROUP}.GroupCoordinator._all_gather_into_tensor": "gathers rows after the last layer",
    f"{_SRT}.runtime_context.get_parallel": "SGLang's parallel state",
    f"{_SRT}.runtime_context.ParallelContext.override": "groups.base_scope: the MoE groups",
    f"{_SRT}.layers.moe.utils.post_experts_reduction_group": "why groups.base_scope overrides moe_tp_group",
    f"{_SRT}.layers.radix_attention.RadixAttention": "attributes and call of the layers that exchange",
    f"{_SRT}.layers.vocab_parallel_embedding.VocabParallelEmbedding": "mask_foreign_ids, weights.padded_as",
    f"{_SRT}.model_loader.loader.DefaultModelLoader.initialize_model_for_startup": "weights.build",
    f"{_SRT}.configs.device_config.DeviceConfig": "weights.build",
    f"{_SRT}.layers.linear.QKVParallelLinear": "weights.cut_of",
    f"{_SRT}.layers.linear.MergedColumnParallelLinear": "weights.cut_of",
    f"{_SRT}.layers.linear.ColumnParallelLinear": "weights.cut_of",
    f"{_SRT}.layers.linear.RowParallelLinear": "weights.cut_of",
    f"{_SRT}.layers.quantization.unquant.UnquantizedLinearMethod": "weights.cut_of: takes strided weights",
    f"{_SRT}.layers.quantization.unquant.UnquantizedEmbeddingMethod": "weights.refuse",
    f"{_SRT}.layers.quantization.unquant.UnquantizedFusedMoEMethod": "weights.cut_of: how expert weights lie",
    f"{_SRT}.layers.quantization.unquant.get_bf16_gemm_backend": "weights.cut_of: which takes strided weights",
    f"{_SRT}.layers.moe.fused_moe_triton.layer.FusedMoE": "weights.cut_of",
    f"{_SRT}.layers.dual_gemm.DualGemm": "weights: off in the base model",
    f"{_SRT}.layers.quantization.fp8_activation.DenseSiluAndMulQuant": "weights: off in the base model",
    f"{_SRT}.layers.quantization.kv_cache.BaseKVCacheMethod": "weights.is_quantized: the stock layer's",
    f"{_SRT}.layers.quantization.fp8.Fp8LinearMethod": "weights: how weights lie as loaded",
    f"{_SRT}.layers.quantization.fp8.Fp8MoEMethod": "weights: how weights lie as loaded",
    f"{_FP8}.CompressedTensorsW8A8Fp8": "weights: how weights lie as loaded",
    f"{_FP8}_moe.CompressedTensorsW8A8Fp8MoE": "weights: how weights lie as loaded",
    f"{_SRT}.model_loader.loader.DefaultModelLoader.postprocess_weights": "processes the base model's weights",
    f"{_SRT}.arg_groups.model_override_base.is_attention_backend_not_set": "resolution.default_attention_backend",
    f"{_SRT}.utils.common.is_cuda": "weights.refuse",
    f"{_SRT}.utils.common.is_cpu": "weights.refuse",
    **{
        f"{_SRT}.models.{mlp}.forward": "weights.GATED_MLPS"
        for mlp in (
            "llama.LlamaMLP",
            "qwen2.Qwen2MLP",
            "gemma2.Gemma2MLP",
            "gemma3_causal.Gemma3MLP",
            "glm4.Glm4MLP",
            "olmo2.Olmo2MLP",
            "commandr.CohereMLP",
            "granite.GraniteMLP",
        )
    },
    f"{_SRT}.entrypoints.http_server._setup_and_run_http_server": "http_app: how tokenizer workers find the app",
    f"{_SRT}.layers.logits_processor.LogitsProcessor._get_pruned_states": "model_runner.rows_after_prefill follows it",
    f"{_RUNNER}.model_runner_components.load_model_utils.load_model_with_memory_saver": "loads the base model",
    f"{_RUNNER}.runner.prefill_cuda_graph_runner._resolve_transformer_layer_model": "finds the decoder stack",
    f"{_RUNNER}.runner.eager_runner.EagerRunner._execute_extend": "how a decoder stack is called",
    f"{_RUNNER}.runner.base_runner.BaseRunner._dummy_run": "autotune times it, model_runner.run_base_once runs it",
    f"{_RUNNER}.runner.base_runner.BaseRunner._alloc_dummy_decode_buffers": "autotune: the batches of zeros",
    f"{_RUNNER}.model_runner_components.cuda_graph_setup.capture_cuda_graphs": "autotune: captures after the eager "
    "runner is made",
    f"{_SRT}.runtime_context.get_exec": "autotune: sizes of graphs",
    f"{_SRT}.runtime_context.get_schedule": "autotune: the chunk",
    f"{_RUNNER}.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute": "a graph replays without our code",
    f"{_RUNNER}.runner_utils.capture_mode.get_is_capture_mode": "model_runner.can_run_in_base",
    f"{_RUNNER}.forward_batch_info.ForwardMode": "model_runner.can_run_in_base",
    f"{_RUNNER}.cuda_graph_config.Phase": "resolution.plan_graphs",
    f"{_RUNNER}.cuda_graph_config.with_phase": "resolution.plan_graphs",
    f"{_SRT}.utils.common.reserve_rope_cache_for_long_sequences": "ModelRunner.load_model calls it for its model",
    f"{_SRT}.utils.common.direct_register_custom_op": "why groups.SpGroup calls what is behind the operators",
    # The CPU platform's
    f"{_SRT}.platforms.interface.SRTPlatform": "base class",
    f"{_SRT}.platforms.cpu.CpuDeviceMixin": "base class",
    f"{_SRT}.configs.update_config.adjust_config_with_unaligned_cpu_tp": "replaced: pads heads",
}


class State(StrEnum):
    HOLDS = "holds"
    CHANGED = "changed upstream"
    MISSING = "missing"


def targets() -> list[str]:
    """All of SGLang that has a fingerprint, hooks first."""
    return [hook.target for hook in registry.ALL] + list(RELIED_ON)


class Recorded(NamedTuple):
    """The release that the patches were written against."""

    sglang: str
    files: dict[str, str | None]  # digests of the files that the targets are in
    fingerprints: dict[str, str]  # by target


@cache
def recorded() -> Recorded:
    return Recorded(**json.loads(FILE.read_text()))


def installed() -> Tree:
    """The installed SGLang; finds its folder without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise registry.HookError("SGLang is not installed in this environment")
    return Tree(Path(spec.submodule_search_locations[0]).parent)


def states(tree: Tree) -> dict[str, State]:
    """What became of each target in another source tree; a target without a fingerprint counts as changed."""

    def state(target: str) -> State:
        source = tree.find(target)
        if source is None:
            return State.MISSING
        return State.HOLDS if source.fingerprint == recorded().fingerprints.get(target) else State.CHANGED

    return {target: state(target) for target in targets()}


def verify() -> None:
    """Check the installed SGLang; in the launcher only, whose ranks import the same files.

    Raises:
        HookError: naming each function that is not what the patches were written against, unless
            ``SGL_SHIFT_ALLOW_CHANGED_SGLANG=1`` takes the risk.
    """
    sglang, released = installed(), recorded()
    if sglang.digests(released.files) == released.files:  # milliseconds; parsing them takes up to a second
        return
    differ = {target: state for target, state in states(sglang).items() if state is not State.HOLDS}
    if not differ:
        return
    lines = "".join(f"\n  {state}: {target}" for target, state in differ.items())
    message = f"this SGLang differs from release {registry.SGLANG_VERSION} in what Shift Parallelism relies on:{lines}"
    if switched_on(ALLOW_VARIABLE):
        logger.warning("%s\n%s is set: going on, at the risk of wrong answers", message, ALLOW_VARIABLE)
        return
    raise registry.HookError(
        f"{message}\nReinstall sglang=={registry.SGLANG_VERSION}, start without --sp-size, or accept the risk of wrong "
        f"answers with {ALLOW_VARIABLE}=1. python -m sgl_shift.doctor shows all of it"
    )


def of_installed() -> Recorded:
    """What ``fingerprints.json`` has to say if the patches are written against the installed SGLang.

    Raises:
        HookError: a target does not exist in it.
    """
    sglang = installed()
    found = {target: sglang.find(target) for target in targets()}
    if missing := [target for target, source in found.items() if source is None]:
        raise registry.HookError(f"not in the installed SGLang: {', '.join(missing)}")
    prints = {target: source.fingerprint for target, source in found.items() if source is not None}
    return Recorded(registry.SGLANG_VERSION, sglang.digests(), prints)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(of_installed()._asdict(), indent=1) + "\n")
