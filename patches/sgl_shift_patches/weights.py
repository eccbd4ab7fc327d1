"""Which weight of an SGLang model is cut how, and the base model's weights out of those that are loaded."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sgl_shift.config import switched_on
from sgl_shift.forward import ShiftParallel
from sgl_shift.storage import Cut, Part, SharedWeight, assemble, gathered, natural_order


class CannotShareError(Exception):
    """Why the base model has to be read from the checkpoint once more."""


# The forward of these is gate_up_proj, act_fn, down_proj, each called as a module. act_fn works on the halves of a row,
# so that it may be given shard by shard what gate_up_proj puts out, and no re-ordering copy is made.
GATED_MLPS = frozenset(
    {"LlamaMLP", "Qwen2MLP", "Gemma2MLP", "Gemma3MLP", "Glm4MLP", "Olmo2MLP", "CohereMLP", "GraniteMLP"}
)

_QUANTIZED_COLUMNS = (
    "fp8_kernel.py:w8a8_block_fp8_matmul_triton asserts contiguous weights, FP8 GEMMs are for packed ones"
)
_LAYOUT = "scales are laid out for their kernel, and shards of them do not lie one after the other"
_EXPERTS_ROWS = (
    "fused_experts applies the activation to the halves of what w13 puts out, and asserts contiguous weights"
)


def build(runner: Any, shift: ShiftParallel) -> nn.Module:
    """The same model once more, for the base TP degree, with weights that nobody has loaded yet."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    with shift.base_scope(), padded_as(shift.layout.world_size):
        return DefaultModelLoader.initialize_model_for_startup(
            SimpleNamespace(load_config=runner.load_config),  # all that is read of a loader
            model_config=runner.model_config,
            device_config=DeviceConfig(runner.device, runner.gpu_id),
        ).eval()


@dataclass(eq=False)
class Weight:
    """A parameter by its place: an update may put another one there (``process_weights_after_loading``).

    ``data`` of one that is stored transposed is [out, in] all the same, so that rows come first."""

    module: nn.Module
    name: str
    transposed: bool = False

    @property
    def parameter(self) -> torch.nn.Parameter:
        return self.module.get_parameter(self.name)

    @property
    def data(self) -> torch.Tensor:
        return self.parameter.data.t() if self.transposed else self.parameter.data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.parameter.data = value.t() if self.transposed else value


def share(shift: ShiftParallel, base: nn.Module, stock: nn.Module) -> None:
    """Make the weights of two decoder stacks one, and gather what the ranks have loaded. Collective.

    What SGLang made of a quantized weight after loading is compared first: a layer whose base weights are not those of
    its shards side by side keeps its own.

    Raises:
        CannotShareError: a layer whose cut is not known; nothing is changed then, on any rank.
    """
    sp_size, sp_rank = shift.layout.sp_size, shift.layout.sp_rank(shift.rank)
    shared: dict[int, SharedWeight] = {}
    by_shard: set[nn.Module] = set()
    for path, mine, theirs, cuts in list(_plan(base, stock, sp_size)):
        if is_quantized(theirs) and not _same_after_loading(shift, mine, theirs, cuts):
            shift.why_separate = shift.why_separate or (
                f"what {type(theirs.quant_method).__name__} makes of {path} after loading differs from shard to shard"
            )
            continue
        for tp, cut in cuts.items():
            if id(tp.parameter) in shared:  # tied
                getattr(mine, tp.name).data = shared[id(tp.parameter)].base.data
            else:
                weight = SharedWeight(cut, tp, Weight(mine, tp.name, tp.transposed), sp_size, sp_rank)
                weight.gather(shift.sp_group)
                shared[id(tp.parameter)] = weight
        if any(cut.parts and not cut.copy for cut in cuts.values()):
            by_shard.add(mine)
    shift.shared = list(shared.values())
    theirs = dict(stock.named_modules())
    for path, module in base.named_modules():
        _put_out_in_natural_order(module, theirs[path], sp_size, by_shard)


def gather(shift: ShiftParallel) -> None:
    """After the TP weights have changed: the base weights as well. Collective over the SP group."""
    for weight in shift.shared:
        weight.gather(shift.sp_group)


def gather_as_loaded(shift: ShiftParallel, base: nn.Module, stock: nn.Module) -> None:
    """Fill quantized layers of the base model from what the ranks have loaded and not yet processed. Collective.

    Raises:
        CannotShareError: as for :func:`share`.
    """
    for path, mine, theirs, cuts in list(_plan(base, stock, shift.layout.sp_size)):
        if not is_quantized(theirs):
            continue
        for tp, cut in cuts.items():
            shards = gathered(tp.data, shift.layout.sp_size, shift.sp_group)
            if cut.dim is None and any(not _same_bytes(shard, shards[0]) for shard in shards):
                raise CannotShareError(f"{path}.{tp.name} is one for all shards, and differs between them")
            getattr(mine, tp.name).data.copy_(shards[0] if cut.dim is None else assemble(shards, cut))


def _same_after_loading(shift: ShiftParallel, base: Any, stock: Any, cuts: dict[Weight, Cut]) -> bool:
    """Whether the base layer's weights are, byte for byte, the shards' side by side; on all ranks of the SP group."""
    sp_size = shift.layout.sp_size
    same = True
    for tp, cut in cuts.items():
        mine = Weight(base, tp.name, tp.transposed).data
        shards = gathered(tp.data, sp_size, shift.sp_group)
        same &= (
            all(_same_bytes(mine, shard) for shard in shards)
            if cut.dim is None
            else (_same_bytes(mine, assemble(shards, cut)))
        )
    flag = next(stock.parameters()).new_tensor([same], dtype=torch.uint8)
    return bool(gathered(flag, sp_size, shift.sp_group).all())


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    mine, theirs = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return bool(torch.equal(mine, theirs))


def _plan(
    base: nn.Module, stock: nn.Module, sp_size: int
) -> Iterator[tuple[str, nn.Module, nn.Module, dict[Weight, Cut]]]:
    """(path, base layer, stock layer, the stock layer's parameters with their cuts) for each layer of the stack."""
    theirs = dict(stock.named_modules())
    for path, module in base.named_modules():
        if path not in theirs or type(module) is not type(theirs[path]):
            raise CannotShareError(f"{path or 'the model'} is not the same module in both configurations")
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        cuts: dict[Weight, Cut] = {}
        for name, parameter in theirs[path].named_parameters(recurse=False, remove_duplicate=False):
            if name not in own:
                raise CannotShareError(f"{path}.{name} is in one configuration only")
            tp = Weight(theirs[path], name, _is_transposed(parameter))
            cut = cut_of(module, theirs[path], name, sp_size)
            if tp.transposed and cut.dim is not None:
                cut = cut._replace(dim=1 - cut.dim)
            _check(f"{path}.{name}", tp, Weight(module, name, tp.transposed), cut, sp_size)
            cuts[tp] = cut
        if is_quantized(theirs[path]) and not all(map(_lies_shard_by_shard, cuts.items())):
            cuts = {tp: cut if cut.dim is None else cut._replace(copy=_LAYOUT) for tp, cut in cuts.items()}
        yield path, module, theirs[path], cuts


def _lies_shard_by_shard(item: tuple[Weight, Cut]) -> bool:
    """Whether shards of a weight can lie one after the other, as its kernel finds it. Scales may be aligned, or have
    their rows elsewhere; then all of the layer's weights are copies, in the order that the model expects."""
    tp, cut = item
    return cut.dim is None or bool(cut.copy) or (cut.dim == 0 and tp.data.is_contiguous())


def _is_transposed(parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and not parameter.is_contiguous() and parameter.t().is_contiguous()


def _check(name: str, tp: Weight, base: Weight, cut: Cut, sp_size: int) -> None:
    """Raise unless shapes and dtypes say what the cut says."""
    shard, mine = tp.data, base.data
    expected = list(shard.shape)
    if cut.dim is not None:
        parts = cut.parts or (Part(expected[cut.dim]),)
        expected[cut.dim] = sum(part.rows * (sp_size // part.repeats) for part in parts)
    if list(mine.shape) != expected or shard.dtype != mine.dtype or shard.is_meta:
        raise CannotShareError(
            f"{name} is {list(shard.shape)} {shard.dtype} in TP, {list(mine.shape)} {mine.dtype} in base"
        )


SEPARATE_VARIABLE = "SGL_SHIFT_SEPARATE_WEIGHTS"


def refuse(stock: nn.Module, as_loaded: bool) -> None:
    """Raise :class:`CannotShareError` where asked for, and for weights that are no longer as they were loaded
    (``process_weights_after_loading``), before a base model is made in vain.

    Args:
        as_loaded: weights have been loaded and not yet processed.
    """
    from sglang.srt.utils import is_cpu, is_cuda

    if switched_on(SEPARATE_VARIABLE):
        raise CannotShareError(f"{SEPARATE_VARIABLE} asks for it")
    device = next(stock.parameters()).device.type
    if not (is_cuda() or (device == "cpu" and not is_cpu())):  # is_cpu: SGLang's own CPU engine, which packs for AMX
        raise CannotShareError(f"weights may be re-arranged for the kernels of this platform ({device})")
    for path, module in stock.named_modules():
        if is_quantized(module) and not (as_loaded and _concatenates(module)):
            scheme = getattr(module, "scheme", module.quant_method)
            raise CannotShareError(f"{path} is quantized ({type(scheme).__name__})")


def is_quantized(module: nn.Module) -> bool:
    """Whether a layer's weights are. Scales of the KV cache are the stock layer's, which both configurations call."""
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
    from sglang.srt.layers.quantization.unquant import (
        UnquantizedEmbeddingMethod,
        UnquantizedFusedMoEMethod,
        UnquantizedLinearMethod,
    )

    method = getattr(module, "quant_method", None)
    plain = (BaseKVCacheMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod, UnquantizedLinearMethod)
    return method is not None and not isinstance(method, plain) and next(module.parameters(False), None) is not None


def _concatenates(module: Any) -> bool:
    """Schemes whose weights, as loaded, are whole rows, columns and blocks with their scales, or not quantized yet."""
    from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_fp8 import (
        CompressedTensorsW8A8Fp8,
    )
    from sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors_w8a8_fp8_moe import (
        CompressedTensorsW8A8Fp8MoE,
    )
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod

    return type(module.quant_method) in (Fp8LinearMethod, Fp8MoEMethod) or type(getattr(module, "scheme", None)) in (
        CompressedTensorsW8A8Fp8,
        CompressedTensorsW8A8Fp8MoE,
    )


def cut_of(base: nn.Module, stock: nn.Module, name: str, sp_size: int) -> Cut:
    """How the parameter ``name`` of a layer is cut, by what SGLang's layer object says.

    Raises:
        CannotShareError: the layer is not known.
    """
    from sglang.srt.layers import linear
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if is_quantized(stock):
        return _cut_of_quantized(base, stock, name, sp_size)
    match stock:
        case linear.QKVParallelLinear() | linear.MergedColumnParallelLinear():
            return Cut(0, _parts(base, stock, sp_size))
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


def _parts(base: Any, stock: Any, sp_size: int) -> tuple[Part, ...]:
    """What a TP shard's rows are fused of."""
    from sglang.srt.layers import linear

    match stock:
        case linear.QKVParallelLinear():
            # Several shards of an SP group have the same K and V where KV heads are replicated.
            repeats = sp_size * stock.num_kv_heads // base.num_kv_heads
            return (
                Part(stock.q_proj_shard_size),
                Part(stock.kv_proj_shard_size, repeats),
                Part(stock.v_proj_shard_size, repeats),
            )
        case linear.MergedColumnParallelLinear():
            return tuple(Part(rows) for rows in stock.output_partition_sizes)
    return ()


def _cut_of_quantized(base: Any, stock: Any, name: str, sp_size: int) -> Cut:
    """By the one dimension in which the shapes differ, before and after ``process_weights_after_loading``. Scales have
    a row for so many rows of the weight; one for a whole matrix is the same in every shard."""
    from sglang.srt.layers import linear
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    mine, shard = getattr(base, name), getattr(stock, name)
    differ = [dim for dim in range(shard.ndim) if mine.ndim != shard.ndim or mine.shape[dim] != shard.shape[dim]]
    if not differ:
        return Cut()
    [dim, *others] = differ
    if others:
        raise CannotShareError(
            f"{type(stock).__name__}.{name} is {list(shard.shape)} in TP, {list(mine.shape)} in base"
        )
    match stock:
        case linear.QKVParallelLinear() | linear.MergedColumnParallelLinear() | linear.ColumnParallelLinear():
            parts, copy = _parts(base, stock, sp_size), ""
            rows = [part.rows for part in parts] or [stock.output_size_per_partition]
        case linear.RowParallelLinear():
            parts, copy, rows = (), _QUANTIZED_COLUMNS, [stock.input_size_per_partition]
        case FusedMoE():
            width = stock.intermediate_size_per_partition
            fused = 2 if name.startswith("w13") and stock.moe_runner_config.is_gated else 1
            rows, parts = [width] * fused, (Part(width),) * fused
            copy = _EXPERTS_ROWS if name.startswith("w13") else _QUANTIZED_COLUMNS
        case _:
            raise CannotShareError(f"{type(stock).__name__} is cut in a way that is not known")
    unit, rest = divmod(sum(rows), shard.shape[dim])
    if rest or any(row % unit for row in rows) or unit not in (1, *_block(stock)):
        raise CannotShareError(f"{name} has {shard.shape[dim]} rows for {rows} of the weight")
    return Cut(dim, tuple(Part(part.rows // unit, part.repeats) for part in parts), copy)


def _block(module: Any) -> tuple[int, ...]:
    """Rows and columns that one scale is for, where there are several a matrix."""
    for owner in (
        module.quant_method,
        getattr(module, "scheme", None),
        getattr(module.quant_method, "quant_config", None),
    ):
        if size := getattr(owner, "weight_block_size", None):
            return tuple(size)
    return ()


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


def _put_out_in_natural_order(base: Any, stock: Any, sp_size: int, by_shard: set[nn.Module]) -> None:
    """Let a layer whose fused weight lies shard by shard serve a model that expects it part by part."""
    if type(base).__name__ in GATED_MLPS and base.gate_up_proj in by_shard:
        base.act_fn.forward = functools.partial(_activate_by_shard, base.act_fn.forward, sp_size)
        if hasattr(base, "dual_gemm"):
            base.dual_gemm.mode = None  # layers/dual_gemm.py: one kernel for both, which reads gate and up by halves
        if hasattr(base, "activation_quant"):
            base.activation_quant.enabled = False  # fp8_activation.py: likewise
        by_shard.discard(base.gate_up_proj)
    elif base in by_shard:
        base.forward = functools.partial(_reordered, base.forward, _parts(base, stock, sp_size), sp_size)


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
