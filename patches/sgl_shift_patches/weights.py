"""Which weight of an SGLang model is cut how, and the base model's weights out of those that are loaded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sgl_shift.config import switched_on
from sgl_shift.forward import ShiftParallel
from sgl_shift.storage import Cut, Part, SharedWeight, natural_order


class CannotShareError(Exception):
    """Why the base model has to be read from the checkpoint once more."""


# The forward of these is gate_up_proj, act_fn, down_proj, each called as a module. act_fn works on the halves of a row,
# so that it may be given shard by shard what gate_up_proj puts out, and no re-ordering copy is made.
GATED_MLPS = frozenset(
    {"LlamaMLP", "Qwen2MLP", "Gemma2MLP", "Gemma3MLP", "Glm4MLP", "Olmo2MLP", "CohereMLP", "GraniteMLP"}
)

_EXPERTS_ROWS = (
    "fused_experts applies the activation to the halves of what w13 puts out, and asserts contiguous weights"
)


def build(runner: Any, shift: ShiftParallel) -> nn.Module:
    """The same model once more, for the base TP degree, with weights that nobody has loaded yet."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    with shift.base_scope(), padded_as(shift.layout.world_size):
        return DefaultModelLoader.initialize_model_for_startup(
            runner.loader,  # any loader: what is read of it is load_config
            model_config=runner.model_config,
            device_config=DeviceConfig(runner.device, runner.gpu_id),
        ).eval()


def share(shift: ShiftParallel, base: nn.Module, stock: nn.Module) -> None:
    """Make the weights of two decoder stacks one, and gather what the ranks have loaded. Collective.

    Raises:
        CannotShareError: a layer whose cut is not known; nothing is changed then, on any rank.
    """
    plan = list(_plan(shift, base, stock))
    sp_size, sp_rank = shift.layout.sp_size, shift.layout.sp_rank(shift.rank)
    shared: dict[int, SharedWeight] = {}
    for tp, mine, cut in plan:
        if id(tp) in shared:  # tied
            mine.data = shared[id(tp)].base.data
        else:
            shared[id(tp)] = SharedWeight(cut, tp, mine, sp_size, sp_rank)
            shared[id(tp)].gather(shift.sp_group)
    shift.shared = list(shared.values())
    theirs = dict(stock.named_modules())
    for path, module in base.named_modules():
        _put_out_in_natural_order(module, theirs[path], sp_size)


def gather(shift: ShiftParallel) -> None:
    """After the TP weights have changed: the base weights as well. Collective over the SP group."""
    for weight in shift.shared:
        weight.gather(shift.sp_group)


def _plan(shift: ShiftParallel, base: nn.Module, stock: nn.Module) -> Iterator[tuple[Any, Any, Cut]]:
    """(TP parameter, base parameter, cut) for each parameter of the stack."""
    theirs = dict(stock.named_modules())
    for path, module in base.named_modules():
        if path not in theirs or type(module) is not type(theirs[path]):
            raise CannotShareError(f"{path or 'the model'} is not the same module in both configurations")
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in theirs[path].named_parameters(recurse=False, remove_duplicate=False):
            cut = cut_of(module, theirs[path], name, shift.layout.sp_size)
            _check(f"{path}.{name}", parameter, own[name], cut, shift.layout.sp_size)
            yield parameter, own[name], cut


def _check(name: str, tp: torch.Tensor, base: torch.Tensor, cut: Cut, sp_size: int) -> None:
    """Raise unless shapes and dtypes say what the cut says."""
    expected = list(tp.shape)
    if cut.dim is not None:
        parts = cut.parts or (Part(expected[cut.dim]),)
        expected[cut.dim] = sum(part.rows * (sp_size // part.repeats) for part in parts)
    if list(base.shape) != expected or tp.dtype != base.dtype or not tp.is_contiguous():
        raise CannotShareError(f"{name} is {list(tp.shape)} {tp.dtype} in TP, {list(base.shape)} {base.dtype} in base")


SEPARATE_VARIABLE = "SGL_SHIFT_SEPARATE_WEIGHTS"


def refuse(stock: nn.Module) -> None:
    """Raise :class:`CannotShareError` where asked for, and for weights that are no longer as they were loaded
    (``process_weights_after_loading``), before a base model is made in vain."""
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedFusedMoEMethod,
        UnquantizedLinearMethod,
    )
    from sglang.srt.utils import is_cpu, is_cuda

    if switched_on(SEPARATE_VARIABLE):
        raise CannotShareError(f"{SEPARATE_VARIABLE} asks for it")
    device = next(stock.parameters()).device.type
    if not (is_cuda() or (device == "cpu" and not is_cpu())):  # is_cpu: SGLang's own CPU engine, which packs for AMX
        raise CannotShareError(f"weights may be re-arranged for the kernels of this platform ({device})")
    plain = (UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod, UnquantizedLinearMethod)
    for path, module in stock.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not isinstance(method, plain):
            raise CannotShareError(f"{path} is quantized ({type(method).__name__})")


def cut_of(base: nn.Module, stock: nn.Module, name: str, sp_size: int) -> Cut:
    """How the parameter ``name`` of a layer is cut, by what SGLang's layer object says.

    Raises:
        CannotShareError: the layer is not known.
    """
    from sglang.srt.layers import linear
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    match stock:
        case linear.QKVParallelLinear():
            return Cut(0, _qkv_parts(base, stock, sp_size))
        case linear.MergedColumnParallelLinear():
            return Cut(0, tuple(Part(rows) for rows in stock.output_partition_sizes))
        case linear.ColumnParallelLinear() | VocabParallelEmbedding():
            return Cut(0)
        case linear.RowParallelLinear():
            return Cut(1, copy=_columns_need_copies(stock)) if name == "weight" else Cut()
        case linear.ReplicatedLinear():
            return Cut()
        case linear.LinearBase():
            raise CannotShareError(f"{type(stock).__name__} is cut in a way that is not known")
        case FusedMoE():
            return _cut_of_experts(stock, name)
    return _by_shape(base, stock, name, sp_size)


def _qkv_parts(base: Any, stock: Any, sp_size: int) -> tuple[Part, ...]:
    """Q, K and V of one TP shard; several shards of an SP group have the same K and V where KV heads are replicated."""
    repeats = sp_size * stock.num_kv_heads // base.num_kv_heads
    return (
        Part(stock.q_proj_shard_size),
        Part(stock.kv_proj_shard_size, repeats),
        Part(stock.v_proj_shard_size, repeats),
    )


def _cut_of_experts(stock: Any, name: str) -> Cut:
    """Weights [experts, out, in]: gate and up fused along ``out``, the second projection cut along ``in``."""
    method = stock.quant_method
    if (
        stock.with_bias
        or method.use_triton_kernels
        or method.use_flashinfer_trtllm_moe
        or method.use_flashinfer_cutlass
        or method.w13_swiglu_interleaved
    ):
        raise CannotShareError("the expert weights have been re-arranged for their kernel")
    rows = stock.intermediate_size_per_partition
    match name:
        case "w13_weight":
            return Cut(1, (Part(rows),) * (2 if stock.moe_runner_config.is_gated else 1), copy=_EXPERTS_ROWS)
        case "w2_weight":
            return Cut(2, copy=_experts_need_copies(stock))
    raise CannotShareError(f"expert parameter {name} is not known")


def _columns_need_copies(stock: Any) -> str:
    """Row-parallel weights become strided views, unless a kernel that does not look at strides may read them."""
    from sglang.srt.layers.quantization.unquant import get_bf16_gemm_backend

    if stock.weight.is_cuda and stock.weight.dtype == torch.bfloat16 and get_bf16_gemm_backend().is_cutedsl():
        return "the CuTe DSL GEMM (--bf16-gemm-backend) takes no leading dimension"
    return ""


def _experts_need_copies(stock: Any) -> str:
    """The loop over experts in torch that a CPU runs takes strides."""
    return "fused_moe.py:fused_experts_impl asserts that w2 is contiguous" if stock.w2_weight.is_cuda else ""


def _by_shape(base: nn.Module, stock: nn.Module, name: str, sp_size: int) -> Cut:
    """Norms, sinks and the like: the same in both, or one value a head, cut along the first dimension."""
    mine, theirs = getattr(base, name).shape, getattr(stock, name).shape
    if mine == theirs:
        return Cut()
    if mine[0] == theirs[0] * sp_size and mine[1:] == theirs[1:]:
        return Cut(0)
    raise CannotShareError(f"{type(stock).__name__}.{name} is {list(theirs)} in TP and {list(mine)} in base")


def _put_out_in_natural_order(base: Any, stock: Any, sp_size: int) -> None:
    """Let a layer whose fused weight lies shard by shard serve a model that expects it part by part."""
    from sglang.srt.layers import linear

    if type(base).__name__ in GATED_MLPS:
        base.act_fn.forward = functools.partial(_activate_by_shard, base.act_fn.forward, sp_size)
        if hasattr(base, "dual_gemm"):
            base.dual_gemm.mode = None  # layers/dual_gemm.py: one kernel for both, which reads gate and up by halves
        base.gate_up_proj.shift_by_shard = True
    elif isinstance(base, linear.QKVParallelLinear):
        base.forward = functools.partial(_reordered, base.forward, _qkv_parts(base, stock, sp_size), sp_size)
    elif isinstance(base, linear.MergedColumnParallelLinear) and not hasattr(base, "shift_by_shard"):
        base.forward = functools.partial(
            _reordered, base.forward, cut_of(base, stock, "weight", sp_size).parts, sp_size
        )


def _reordered(forward: Callable[..., Any], parts: tuple[Part, ...], sp_size: int, *args: Any, **kwargs: Any) -> Any:
    output, bias = forward(*args, **kwargs)
    return natural_order(output, parts, sp_size), None if bias is None else natural_order(bias, parts, sp_size)


def _activate_by_shard(forward: Callable[..., Any], sp_size: int, gate_up: torch.Tensor) -> torch.Tensor:
    """An activation of [rows, gate | up] on [rows, SP, gate | up of one shard]."""
    rows = gate_up.shape[:-1]
    return forward(gate_up.reshape(-1, gate_up.shape[-1] // sp_size)).reshape(*rows, -1)


@contextmanager
def padded_as(world_size: int) -> Iterator[None]:
    """Inside, vocabularies are padded as for a TP degree of ``world_size``, so that their shards lie in each other."""
    from sglang.srt.layers import vocab_parallel_embedding as module

    original = module.VocabParallelEmbedding.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        vocabulary = given["org_num_embeddings"] or given["num_embeddings"]
        if module.pad_vocab_size(vocabulary, given["padding_size"]) % world_size:
            given["padding_size"] *= world_size
        original(*bound.args, **bound.kwargs)

    module.VocabParallelEmbedding.__init__ = init
    try:
        yield
    finally:
        module.VocabParallelEmbedding.__init__ = original
