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
from tests.checkpoints import DENSE, Tiny
from tests.parity import Requests
from tests.test_parity import swap_two_heads

REQUESTS = Requests.random(8, [33, 9, 1], [2, 3, 2])
BLOCK = 16
ROUNDING = 0.1  # the last digit of a float32 may decide how a KV value is rounded; seen so far: 6e-6


@dataclasses.dataclass(frozen=True)
class BlockFp8(Tiny):
    """A checkpoint with FP8 linear weights, one scale for BLOCK x BLOCK of them."""

    @property
    def config(self) -> dict[str, Any]:
        scheme = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
        return {**super().config, "quantization_config": scheme, "torch_dtype": "bfloat16"}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors: dict[str, torch.Tensor] = {}
        for name, weight in checkpoints.weights(self).items():
            if "_proj" in name:
                blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
                scales = blocks.abs().amax((1, 3), keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
                tensors[name] = (blocks / scales).reshape(weight.shape).to(torch.float8_e4m3fn)
                tensors[name + "_scale_inv"] = scales[:, 0, :, 0].contiguous()
            else:
                tensors[name] = weight.to(torch.bfloat16)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# Every shard of four ranks is whole blocks.
FP8 = BlockFp8("qwen3-block-fp8", "Qwen3ForCausalLM", "qwen3", hidden=64, intermediate=64, layers=2, qk_norm=True)


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
