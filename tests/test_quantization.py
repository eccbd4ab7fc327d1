"""Quantized checkpoints and KV caches that stock SGLang can be made to run on a CPU.

The other schemes end there in stock itself, for want of a kernel or a Triton driver (``sgl_shift/features.py``).

Block FP8 (the form of Qwen3's and DeepSeek's own checkpoints) runs as it is, its two Triton kernels in Triton's
interpreter. Its scales belong to blocks that no shard cuts, so both configurations compute the same products.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests import checkpoints, parity
from tests.checkpoints import DENSE, MOE, Tiny
from tests.parity import Requests
from tests.probes import Probe
from tests.test_parity import swap_two_heads
from tests.test_weights import in_model_order, update_from_disk

REQUESTS = Requests.random(8, [33, 9, 1], [2, 3, 2])
BLOCK = 16
ROUNDING = 0.1  # the last digit of a float32 may decide how a KV value is rounded; seen so far: 6e-6


@dataclasses.dataclass(frozen=True)
class Fp8(Tiny):
    """A checkpoint with FP8 linear weights."""

    @property
    def config(self) -> dict[str, Any]:
        return {**super().config, "quantization_config": self.scheme(), "torch_dtype": "bfloat16"}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in checkpoints.weights(self).items():
            if "_proj" in name:
                tensors |= self.quantized(name, weight)
            else:
                tensors[name] = weight.to(torch.bfloat16)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class BlockFp8(Fp8):
    """One scale for BLOCK x BLOCK weights: the form of Qwen3's and DeepSeek's own checkpoints."""

    def scheme(self) -> dict[str, Any]:
        return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}

    def quantized(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
        scales = blocks.abs().amax((1, 3), keepdim=True) / FP8_MAX
        return {
            name: (blocks / scales).reshape(weight.shape).to(torch.float8_e4m3fn),
            name + "_scale_inv": scales[:, 0, :, 0].contiguous(),
        }


class ChannelFp8(Fp8):
    """One scale for each row, by compressed-tensors: the form of many FP8 checkpoints of Llama."""

    def scheme(self) -> dict[str, Any]:
        numbers = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**numbers, "strategy": "channel", "dynamic": False},
            "input_activations": {**numbers, "strategy": "token", "dynamic": True},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }

    def quantized(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / FP8_MAX
        return {name: (weight / scales).to(torch.float8_e4m3fn), name + "_scale": scales}


class TensorFp8(Fp8):
    """One scale for each matrix; SGLang brings those of a fused layer to one."""

    def scheme(self) -> dict[str, Any]:
        return {"quant_method": "fp8", "activation_scheme": "dynamic"}

    def quantized(self, name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = weight.abs().amax() / FP8_MAX
        return {name: (weight / scale).to(torch.float8_e4m3fn), name + "_scale": scale.reshape(1)}


FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
# Every shard of four ranks is whole blocks.
FP8 = BlockFp8("qwen3-block-fp8", "Qwen3ForCausalLM", "qwen3", hidden=64, intermediate=64, layers=2, qk_norm=True)
FEW_KV_HEADS_FP8 = dataclasses.replace(FP8, name="qwen3-block-fp8-kv", kv_heads=2)
CHANNEL_FP8 = ChannelFp8(**{**vars(FP8), "name": "qwen3-channel-fp8"})
TENSOR_FP8 = TensorFp8(**{**vars(FP8), "name": "qwen3-tensor-fp8"})
MOE_FP8 = BlockFp8(
    **{
        **vars(MOE),
        "name": "qwen3-moe-block-fp8",
        "layers": 2,
        "intermediate": 64,
        "extra": {**MOE.extra, "moe_intermediate_size": 64},
    }
)


def interpret_fp8_kernels(_rank: int) -> None:
    """In a rank without a GPU: Triton's interpreter for SGLang's FP8 kernels. For stock and for us alike."""
    import triton.language
    from sglang.kernels.ops.gemm import fp8_kernel as gemm
    from sglang.kernels.ops.quantization import fp8_kernel as quantization
    from triton.runtime import JITFunction
    from triton.runtime.interpreter import InterpretedFunction

    for module in (triton.language, triton.language.standard, gemm, quantization):
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                setattr(module, name, InterpretedFunction(function.fn))
    gemm.get_device_name = lambda *_: "CPU"  # names a file of tuned block sizes, if there is one


def difference(expected: Any, answers: Any) -> float:
    """The mean difference of a prompt logprob: quantization noise moves single ones."""
    pairs = [
        abs(a - b)
        for theirs, mine in zip(expected, answers, strict=True)
        for a, b in zip(theirs["prompt_logprobs"], mine["prompt_logprobs"], strict=True)
    ]
    return sum(pairs) / len(pairs)


@pytest.mark.long
def test_block_fp8_checkpoint(start):
    """Activations are bfloat16, so it is coarse: stock TP=1 and TP=2 differ by as much as base and stock."""
    engine = {"dtype": "bfloat16", "in_rank": interpret_fp8_kernels}

    def ask(*args: Any, **more: Any) -> Any:
        with start(FP8, *args, **{**engine, **more}) as host:
            answers = parity.run(host, REQUESTS)
            if "sp_size" in more:
                tokens = host.info()["tokens"]
                assert (tokens["base"] > 0, tokens["shift"] > 0) == (
                    more["shift_mode"] == "sp",
                    more["shift_mode"] == "tp",
                )
            return answers

    def swapped(rank: int) -> None:
        interpret_fp8_kernels(rank)
        swap_two_heads(rank)

    one, two = ask(1, plugin=False), ask(2, plugin=False)
    noise = difference(one, two)
    base = difference(two, ask(2, sp_size=2, shift_mode="sp"))
    wrong = difference(two, ask(2, sp_size=2, shift_mode="sp", in_rank=swapped))
    print(f"stock TP=1 {noise:.2g}, base {base:.2g}, two heads swapped {wrong:.2g}")
    assert noise > 0
    assert base < 2 * noise
    assert wrong > 5 * noise


@pytest.mark.parametrize("dtype", [pytest.param("fp8_e4m3", marks=pytest.mark.long), "fp8_e5m2"])
def test_fp8_kv_cache(dtype, start):
    stock = start(DENSE, 4, plugin=False, kv_cache_dtype=dtype)
    expected = parity.run(stock, REQUESTS)
    stock.close()
    host = start(DENSE, 4, sp_size=2, shift_mode="sp", kv_cache_dtype=dtype)
    assert parity.worst_difference(expected, parity.run(host, REQUESTS)) < ROUNDING
    assert host.info()["tokens"]["shift"] == 0
    host.set(mode="shift", threshold=5)
    host.flush_cache()
    assert parity.worst_difference(expected, parity.run(host, REQUESTS)) < ROUNDING


def load_fp8(rank: int) -> None:
    """For what SGLang does with FP8 weights between a checkpoint and a kernel. For stock and for us alike."""
    from sglang.kernels.ops.quantization import fp8_kernel

    def per_tensor(input: torch.Tensor, output: torch.Tensor, scale: torch.Tensor, is_static: bool) -> None:
        if not is_static:
            scale.copy_(input.abs().max().float() / FP8_MAX)
        output.copy_((input.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(output.dtype))

    interpret_fp8_kernels(rank)
    fp8_kernel.sgl_per_tensor_quant_fp8 = per_tensor  # the CUDA kernel
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def inspect_quantized(scheduler: Any) -> dict[str, Any]:
    """Compare the base stack, byte for byte, with one that SGLang reads from the checkpoint."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import _resolve_transformer_layer_model as stack

    from sgl_shift_patches import model_runner, state

    runner, shift = scheduler.tp_worker.model_runner, state.current()
    fresh = dict(model_runner.read_again(runner, shift).named_parameters())
    stock = dict(stack(runner.model).named_parameters())
    shared = {id(weight.base.parameter): weight for weight in shift.shared}
    differ, kinds = [], {}
    for name, parameter in shift.base_model[0].named_parameters():
        weight = shared.get(id(parameter))
        ours, kind = parameter, "own"
        if weight is not None:
            ours = in_model_order(weight)
            view = parameter.untyped_storage().data_ptr() == stock[name].untyped_storage().data_ptr()
            kind = "view" if view else "copy"
        if ours.shape != fresh[name].shape or not torch.equal(as_bytes(ours), as_bytes(fresh[name])):
            differ.append(name)
        if ".layers.0." in f".{name}":
            kinds[name.split(".layers.0.")[-1].removeprefix("layers.0.")] = kind
    checksum = sum(as_bytes(parameter).long().sum().item() for parameter in fresh.values())
    assert {id(weight.tp.parameter) for weight in shift.shared} <= {id(p) for p in stock.values()}
    return {"differ": differ, "kinds": kinds, "checksum": checksum}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


ROWS_CUT_COLUMNS = {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
SCALES_CUT_COLUMNS = {"self_attn.o_proj.weight_scale_inv", "mlp.down_proj.weight_scale_inv"}
EXPERTS = {f"mlp.experts.{w}_{kind}" for w in ("w13", "w2") for kind in ("weight", "weight_scale_inv")}


@pytest.mark.parametrize(
    ("model", "world", "sp", "copies"),
    [
        (FP8, 2, 2, ROWS_CUT_COLUMNS | SCALES_CUT_COLUMNS),
        (FEW_KV_HEADS_FP8, 4, 4, ROWS_CUT_COLUMNS | SCALES_CUT_COLUMNS),
        (MOE_FP8, 4, 2, {"self_attn.o_proj.weight", "self_attn.o_proj.weight_scale_inv"} | EXPERTS),
        pytest.param(CHANNEL_FP8, 4, 2, ROWS_CUT_COLUMNS, marks=pytest.mark.long),
        pytest.param(TENSOR_FP8, 4, 2, ROWS_CUT_COLUMNS, marks=pytest.mark.long),
    ],
    ids=lambda p: getattr(p, "name", None),
)
def test_weights_are_gathered_before_they_are_processed(model, world, sp, copies, start, tmp_path, checkpoint):
    """The checkpoint is read once. What a kernel takes is a view; and an update reaches both."""
    probe = Probe(tmp_path, inspect_quantized)
    host = start(model, world, sp_size=sp, dtype="bfloat16", in_rank=lambda rank: (load_fp8(rank), probe.install(rank)))
    assert host.info()["separate_weights"] == ""

    def checksums() -> list[int]:
        ranks = [rank["extra"] for rank in host.probe(tmp_path)]
        for rank in ranks:
            assert rank["differ"] == []
            assert {name for name, kind in rank["kinds"].items() if kind != "view"} == copies
        return [rank["checksum"] for rank in ranks]

    before = checksums()
    if isinstance(model, BlockFp8):  # of the others stock SGLang has replaced the parameters that know how to load
        assert host.call(update_from_disk, str(checkpoint(dataclasses.replace(model, name=f"{model.name}-new"))))[0]
        assert all(old != new for old, new in zip(before, checksums(), strict=True))


def test_scales_that_are_aligned_for_their_kernel(start, tmp_path):
    """As DeepGEMM's on Blackwell: their layout stays, and the layer's weights are copies in the model's order."""
    probe = Probe(tmp_path, inspect_quantized)

    def in_rank(rank: int) -> None:
        from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

        def aligned(method: Any, layer: Any) -> None:
            process(method, layer)
            scale = layer.weight_scale_inv.data
            columns = scale.new_zeros(scale.shape[1], scale.shape[0] + 3).t()[: scale.shape[0]]
            layer.weight_scale_inv.data = columns.copy_(scale)

        load_fp8(rank)
        probe.install(rank)
        process = Fp8LinearMethod.process_weights_after_loading
        Fp8LinearMethod.process_weights_after_loading = aligned

    host = start(FP8, 2, sp_size=2, dtype="bfloat16", in_rank=in_rank)
    assert host.info()["separate_weights"] == ""
    for rank in [rank["extra"] for rank in host.probe(tmp_path)]:
        assert rank["differ"] == []
        assert {name for name, kind in rank["kinds"].items() if "_proj" in name and kind != "copy"} == set()


def test_online_quantization_is_each_configurations_own(start, tmp_path):
    """A scale for each shard is not a scale for several side by side: read once, quantized twice, updates refused."""
    probe = Probe(tmp_path, inspect_quantized)
    options = {"dtype": "bfloat16", "quantization": "fp8"}
    host = start(DENSE, 2, sp_size=2, in_rank=lambda rank: (load_fp8(rank), probe.install(rank)), **options)
    assert "differs from shard to shard" in host.info()["separate_weights"]
    for rank in [rank["extra"] for rank in host.probe(tmp_path)]:
        assert rank["differ"] == []
        assert rank["kinds"]["self_attn.qkv_proj.weight"] == "own"
        assert rank["kinds"]["input_layernorm.weight"] == "view"
    assert host.call(update_from_disk, "/nowhere") == [False, True]
