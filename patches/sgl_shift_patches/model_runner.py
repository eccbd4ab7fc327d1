"""ModelRunner: the base model beside the stock one, and the decision in front of both."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sgl_shift.config import Kind
from sgl_shift.forward import TOKEN_DIM, Batch, ShiftParallel
from sgl_shift.layout import HeadLayout, LayoutError
from sgl_shift.policy import Configuration
from sgl_shift.weights import weight_bytes
from sgl_shift_patches import autotune, radix_attention, state, weights

logger = logging.getLogger(__name__)

# How a decoder stack, or a layer of it, is told which hidden states to return beside the last ones (models/*.py:
# set_eagle3_layers_to_capture, set_dflash_layers_to_capture, and what these set in the stack's class).
AUX_CAPTURE = ("layers_to_capture", "capture_aux_hidden_states", "_is_layer_to_capture")


def load_model(stock_load: Callable[..., None], runner: Any) -> None:
    """Around ``ModelRunner.load_model``. Runs before the KV pool is sized, so the pool takes what both models leave."""
    shift = state.current()
    if shift is None or runner.is_draft_worker:
        stock_load(runner)
        return
    loading.runner = runner if shift.config.loads_base else None
    stock_load(runner)
    loading.runner = None
    model = runner.model_config
    original = getattr(model.hf_config, "original_num_attention_heads", model.num_attention_heads)
    if shift.config.loads_base and original != model.num_attention_heads:
        raise LayoutError(
            f"SGLang padded {original} attention heads to {model.num_attention_heads} for this CPU engine; use a "
            "--tp-size that divides the heads, or leave out --sp-size"
        )
    shift.heads = HeadLayout(shift.layout, model.num_attention_heads, model.get_total_num_kv_heads())
    own = weight_bytes([runner.model])
    shift.weight_bytes = {"base": 0, "shift": own, "resident": own}
    if shift.config.loads_base:
        bind(runner, shift, load_base_model(runner, shift))
    if shift.rank == 0:
        logger.info(
            "Shift Parallelism: base (SP=%d, TP=%d) above %s tokens, shift (TP=%d) up to there; mode %s. "
            "Weights a rank: base %.1f MB, shift %.1f MB, %.1f MB together. Each KV head is kept by %d rank(s).",
            shift.layout.sp_size,
            shift.layout.tp_size,
            "measured" if shift.config.auto else shift.settings.threshold,
            shift.layout.world_size,
            shift.settings.mode,
            shift.weight_bytes["base"] / 1e6,
            shift.weight_bytes["shift"] / 1e6,
            shift.weight_bytes["resident"] / 1e6,
            shift.heads.kv_replication,
        )


def load_base_model(runner: Any, shift: ShiftParallel) -> nn.Module:
    """The decoder stack of the same model as an ordinary SGLang model of the base TP degree: on the storage of the
    stock model's weights if it is known how they lie, otherwise read from the checkpoint again."""
    from sglang.srt.utils import reserve_rope_cache_for_long_sequences

    stack = on_shared_storage(runner, shift) or read_again(runner, shift)
    reserve_rope_cache_for_long_sequences(stack, runner.model_config, logger)
    return stack


def on_shared_storage(runner: Any, shift: ShiftParallel) -> nn.Module | None:
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import _resolve_transformer_layer_model

    if shift.why_separate:  # found out while it was loaded
        return None
    stock_stack = _resolve_transformer_layer_model(runner.model)
    stack, loading.base = loading.base, None
    try:
        with _memory_saver_region(runner):
            return _share(runner, shift, stock_stack, stack)
    except weights.CannotShareError as why:
        shift.why_separate = str(why)
        return None


def _share(runner: Any, shift: ShiftParallel, stock_stack: nn.Module, stack: nn.Module | None) -> nn.Module:
    """The base stack; ``stack`` where it has been loaded and awaits processing."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import _resolve_transformer_layer_model
    from sglang.srt.model_loader.loader import DefaultModelLoader

    if stack is None:
        weights.refuse(stock_stack, as_loaded=False)
        # LM head and the like are gone with the rest of the model.
        stack = _resolve_transformer_layer_model(weights.build(runner, shift))
    else:
        with shift.base_scope():
            DefaultModelLoader.postprocess_weights(stack, torch.device(runner.device))
    weights.share(shift, stack, stock_stack)
    return stack


def _memory_saver_region(runner: Any) -> AbstractContextManager[None]:
    """As ``load_model_with_memory_saver``: what is allocated inside goes when weights are released."""
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    region: AbstractContextManager[None] = runner.memory_saver_adapter.region(
        GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=runner.server_args.enable_weights_cpu_backup
    )
    return region


@dataclass
class Loading:
    """What is loading a model, and the base stack that has got its weights in the middle of that."""

    runner: Any = None
    base: nn.Module | None = None


loading = Loading()


def gather_as_loaded(_result: None, model: nn.Module, _weights: Any, _target_device: Any) -> None:
    """After ``DefaultModelLoader.load_weights_only``. What ``process_weights_after_loading`` makes of quantized weights
    does not concatenate; what was loaded does."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import _resolve_transformer_layer_model

    shift, runner = state.current(), loading.runner
    if shift is None or runner is None:
        return
    stock_stack = _resolve_transformer_layer_model(model)
    if not any(weights.is_quantized(module) for module in stock_stack.modules()):
        return
    try:
        weights.refuse(stock_stack, as_loaded=True)
        stack = _resolve_transformer_layer_model(weights.build(runner, shift))
        weights.gather_as_loaded(shift, stack, stock_stack)
    except weights.CannotShareError as why:
        shift.why_separate = str(why)
    else:
        loading.base = stack


def read_again(runner: Any, shift: ShiftParallel) -> nn.Module:
    from sglang.srt.model_executor.model_runner_components.load_model_utils import load_model_with_memory_saver
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import _resolve_transformer_layer_model

    logger.info("Shift Parallelism: the base model has weights of its own, read once more: %s", shift.why_separate)
    if runner.load_config.load_format == "dummy":
        logger.warning("Shift Parallelism: dummy weights differ between the configurations: measure, do not read")
    with shift.base_scope():
        model = load_model_with_memory_saver(
            model_config=runner.model_config,
            load_config=runner.load_config,
            device=runner.device,
            gpu_id=runner.gpu_id,
            memory_saver_adapter=runner.memory_saver_adapter,
            is_draft_worker=False,
        ).model
    return _resolve_transformer_layer_model(model)


def bind(runner: Any, shift: ShiftParallel, base_stack: nn.Module) -> None:
    """Put the decision in front of the stock decoder stack, and the exchange into the base model's attention."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import _resolve_transformer_layer_model

    stock_stack = _resolve_transformer_layer_model(runner.model)
    for base_layer, stock_layer in radix_attention.pair(base_stack, stock_stack):
        base_layer.attention.forward = radix_attention.exchange_around(shift, base_layer, stock_layer)

    mask_foreign_ids(base_stack)

    stock_forward = stock_stack.forward
    signature = inspect.signature(stock_forward)

    @functools.wraps(stock_forward)  # the prefill graph runner and others read the signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        return shift.run(stock_forward, base_stack, describe(runner, _by_name(signature, args, kwargs)))

    stock_stack.forward = forward
    shift.base_model.append(base_stack)  # the stack only: the LM head that follows is the stock model's
    both = weight_bytes([base_stack, runner.model])
    shift.weight_bytes |= {"base": weight_bytes([base_stack]), "resident": both}
    runner.weight_load_mem_usage += (both - shift.weight_bytes["shift"]) / (1 << 30)


def mirror_aux_capture(_result: None, runner: Any) -> None:
    """After ``ModelRunner.init_attention_backends``, which tells the stock model what auxiliary hidden states to
    return: the base model returns the same."""
    shift = state.current()
    if shift is None or runner.is_draft_worker or not shift.base_model:
        return
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import _resolve_transformer_layer_model

    stock = dict(_resolve_transformer_layer_model(runner.model).named_modules())
    for path, module in shift.base_model[0].named_modules():
        for name in AUX_CAPTURE:
            if hasattr(stock[path], name):
                setattr(module, name, getattr(stock[path], name))


def mask_foreign_ids(base_stack: nn.Module) -> None:
    """Embed token ids outside of the vocabulary to zeros, as the stock model does: SGLang does not check what a client
    sends, and where an embedding is not split it does not mask either (``vocab_parallel_embedding.py:forward``), so
    one such request would end a server that stock TP keeps up."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    def masked(embed: Callable[[Tensor], Tensor], size: int, ids: Tensor) -> Tensor:
        foreign = (ids < 0) | (ids >= size)
        return embed(ids.masked_fill(foreign, 0)).masked_fill(foreign.unsqueeze(-1), 0)

    for module in base_stack.modules():
        if isinstance(module, VocabParallelEmbedding) and module.tp_size == 1:
            module.forward = functools.partial(masked, module.forward, module.num_embeddings)


def describe(runner: Any, arguments: dict[str, Any]) -> Batch:
    """What a call of the decoder stack asks for, in the core's terms."""
    from sglang.srt.model_executor.runner_utils.capture_mode import get_is_capture_mode

    forward_batch, captured = arguments["forward_batch"], get_is_capture_mode()
    given = {name: value for name, value in arguments.items() if value is not None and name != "forward_batch"}
    name = next(name for name in TOKEN_DIM if name in given)
    return Batch(
        arguments=arguments,
        num_tokens=given[name].shape[TOKEN_DIM[name]],
        # An argument that is not known to have a row a token could not be cut into slices.
        base_can_run=can_run_in_base(forward_batch, adapters=captured and runner.server_args.enable_lora)
        and given.keys() <= TOKEN_DIM.keys(),
        rows=functools.partial(rows_after_prefill, runner, forward_batch),
        kind=kind_of(forward_batch),
        captured=captured,
    )


def kind_of(forward_batch: Any) -> Kind:
    """What a batch is like, and which runner replays it: ``DecodeCudaGraphRunner`` or ``PrefillCudaGraphRunner``.

    A batch that mixes prefill and decode is one of prefill."""
    return "decode" if forward_batch.forward_mode.is_cuda_graph() else "prefill"


def _by_name(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names; those that only ``**kwargs`` takes under their own."""
    bound = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return bound


def can_run_in_base(forward_batch: Any, *, adapters: bool) -> bool:
    """Batches that the base model can take. All of these are host facts, the same on every rank.

    Args:
        adapters: a graph is captured, which will replay batches with LoRA adapters as well.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return (
        forward_batch.forward_mode
        in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE, ForwardMode.TARGET_VERIFY)
        # LoRA adapters are on the stock model's layers alone.
        and not (adapters or any(adapter is not None for adapter in forward_batch.lora_ids or ()))
    )


def rows_after_prefill(runner: Any, forward_batch: Any) -> Sequence[int] | None:
    """Rows of the hidden states that the stock LogitsProcessor reads, or None for all of them.

    Follows ``layers/logits_processor.py:LogitsProcessor._get_pruned_states``: the last token of each sequence, and
    with input logprobs all from the start that was asked for.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    fb = forward_batch
    if (
        fb.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED)
        or fb.extend_seq_lens_cpu is None
        or not runner.is_generation
        or (fb.capture_hidden_mode is not None and fb.capture_hidden_mode.need_capture())
        or fb.return_hidden_states_before_norm
        or fb.multi_item_delimiter_indices is not None
        or fb.token_indices_to_pool is not None
    ):
        return None
    lengths = [int(length) for length in fb.extend_seq_lens_cpu]
    starts = fb.extend_logprob_start_lens_cpu if fb.return_logprob else lengths
    if starts is None or len(starts) != len(lengths):
        return None
    rows: list[int] = []
    offset = 0
    for length, start in zip(lengths, starts, strict=True):
        rows.extend(range(offset + min(start, length - 1), offset + length))
        offset += length
    return rows


def forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``ModelRunner.forward``: times the step, and counts what a graph replays: our code does not run then."""
    shift = state.current()
    if shift is None or runner.is_draft_worker:
        return original(runner, forward_batch, *args, **kwargs)
    before = shift.stats.total
    with nullcontext() if shift.exporter is None else shift.exporter.step():
        output = original(runner, forward_batch, *args, **kwargs)
        if shift.stats.total == before and not forward_batch.forward_mode.is_idle():
            shift.record_replay(kind_of(forward_batch), forward_batch.input_ids.shape[0])
    return output


def in_both_configurations(original: Callable[..., Any], graph_runner: Any, *args: Any, **kwargs: Any) -> None:
    """Around what tunes kernels with one batch of zeros: both configurations have GEMMs of their own."""
    shift = state.current()
    if shift is None or graph_runner.model_runner.is_draft_worker or not shift.base_model:
        original(graph_runner, *args, **kwargs)
        return
    for configuration in Configuration:
        with shift.forcing(configuration):
            original(graph_runner, *args, **kwargs)


def warm_up_base(_result: None, runner: Any, *args: Any, **kwargs: Any) -> None:
    """After ``ModelRunner.init_cuda_graphs``: kernels that are compiled when they are first called, before requests
    come. Where graphs hold the base configuration this has happened."""
    shift = state.current()
    if shift is None or runner.is_draft_worker or not shift.base_model:
        return
    graphs = shift.graphs()
    for kind, held in graphs.items() if shift.rank == 0 else ():
        sizes = "; ".join(f"{configuration} for {sizes}" for configuration, sizes in held.items())
        logger.info("Shift Parallelism: %s graphs hold, by padded tokens, %s", kind, sizes)
    if runner.device == "cuda" and not any(Configuration.BASE in held for held in graphs.values()):
        run_base_once(runner, shift)


def run_base_once(runner: Any, shift: ShiftParallel) -> None:
    """One batch of zeros, of as many tokens a request as SGLang's decode batches have."""
    requests = min(shift.layout.sp_size, runner.max_running_requests)
    tokens = requests * autotune.tokens_per_request(runner)
    with runner.eager_runner.model_context():
        autotune.Steps(shift, runner.eager_runner, autotune.kinds(runner)[0], tokens)(tokens, Configuration.BASE)
