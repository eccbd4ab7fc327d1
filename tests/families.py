"""Tiny random checkpoints of whole model families, saved by transformers in the names that real ones have.

Complements ``tests/checkpoints.py``, which writes without transformers. Weights are scaled in the same spirit:
attention matters, and every part (norms, biases, sinks, router) differs from its initial value.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests.checkpoints import VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


class Family(NamedTuple):
    """A model family: transformers' configuration class, and what it takes beside the common sizes."""

    name: str
    config_class: str
    options: dict[str, Any]

    def with_kv_heads(self, kv_heads: int) -> Family:
        return self._replace(
            name=f"{self.name}-{kv_heads}kv", options={**self.options, "num_key_value_heads": kv_heads}
        )

    def write(self, folder: Path) -> None:
        in_a_process_of_its_own(_write, self, folder)


PHI3 = Family("phi3", "Phi3Config", {"pad_token_id": 0})
QWEN2_MOE = Family(
    "qwen2-moe",
    "Qwen2MoeConfig",
    {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 96,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2Config",
    {"hidden_act": "gelu_pytorch_tanh", "head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16},
)
GEMMA3 = Family(
    "gemma3",
    "Gemma3TextConfig",
    {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16, "num_key_value_heads": 2},
)
GLM4 = Family("glm4", "Glm4Config", {"head_dim": 16, "attention_bias": True, "pad_token_id": 0})
OLMO2 = Family("olmo2", "Olmo2Config", {})
COHERE = Family("cohere", "CohereConfig", {"logit_scale": 0.5, "use_qk_norm": False})
GRANITE = Family(
    "granite",
    "GraniteConfig",
    {"embedding_multiplier": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.25, "logits_scaling": 0.5},
)
# Named as the released checkpoints are, text only: stock SGLang does not load the experts of a Llama4ForCausalLM.
LLAMA4 = Family(
    "llama4",
    "Llama4Config",
    {
        "head_dim": 16,
        "intermediate_size": 128,
        "intermediate_size_mlp": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 1024,
        "no_rope_layers": [1, 1, 0],
        "use_qk_norm": False,  # SGLang computes it in bfloat16 whatever the dtype, and then fails in float32
        "attn_temperature_tuning": True,
        "floor_scale": 16,  # so that the temperature differs between positions of a short prompt
        "attn_scale": 0.5,
    },
)
GPT_OSS = Family(
    "gpt-oss",
    "GptOssConfig",
    {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
)

FAMILIES = (PHI3, QWEN2_MOE, GEMMA2, GEMMA3, GLM4, OLMO2, COHERE, GRANITE, LLAMA4, GPT_OSS)


def in_a_process_of_its_own(write: Callable[[Any, Path], None], model: Any, folder: Path) -> None:
    """Transformers may start threads, and a process with threads cannot be forked for an engine any more."""
    process = multiprocessing.get_context("fork").Process(target=write, args=(model, folder))
    process.start()
    process.join()
    assert process.exitcode == 0, f"writing {model.name} failed"


def _write(family: Family, folder: Path) -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM

    torch.manual_seed(sum(family.name.encode()))
    options = {**SIZES, **family.options}
    if family.config_class == LLAMA4.config_class:
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        vision |= {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16, "image_size": 28}
        config = transformers.Llama4Config(text_config=options, vision_config=vision)
        model = transformers.Llama4ForConditionalGeneration(config).to(torch.float32)
        del model.vision_model, model.multi_modal_projector
    else:
        config = getattr(transformers, family.config_class)(**options)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    random_values(model)
    model.save_pretrained(folder)


def random_values(model: Any) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_values(name, parameter))


def _values(name: str, parameter: Any) -> Any:
    import torch

    noise = torch.randn_like(parameter)
    if "embed_tokens" in name:
        return noise
    if parameter.dim() == 1 or name.endswith("bias"):
        return parameter + 0.1 * noise
    gain = 2.0 if "attn" in name or "router" in name or "gate.weight" in name else 1.0
    return noise * gain * (3.0 if "lm_head" in name else 1.0) / parameter.shape[-1] ** 0.5


def stand_ins(_rank: int) -> None:
    """In a rank without a GPU: torch where SGLang's models know a GPU kernel only. For stock and for us alike."""
    import torch
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.models import qwen2_moe

    def fused_gate_sigmoid_mul_add(hidden: Any, gate: Any, shared: Any, output: Any) -> None:  # Qwen2-MoE
        output += torch.sigmoid(hidden @ gate)[:, None] * shared

    def softcap(logits: Any, cap: float) -> Any:  # Gemma2
        return logits.copy_(torch.tanh(logits / cap) * cap)

    experts = fused_moe_native.moe_forward_native

    def moe_forward_native(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:  # Llama4: weights on the input
        if config.apply_router_weight_on_input:
            config = dataclasses.replace(config, apply_router_weight_on_input=False)
            x = x * topk_output.topk_weights.to(x.dtype)  # top-1: [tokens, 1]
            topk_output = topk_output._replace(topk_weights=torch.ones_like(topk_output.topk_weights))
        if config.gemm1_alpha is not None:  # gpt-oss, whose weights are [experts, in, out]
            return gpt_oss_experts(layer, x, topk_output, config)
        return experts(layer, x, topk_output, config)

    def gpt_oss_experts(layer: Any, x: Any, topk_output: Any, config: Any) -> Any:
        """Clamped, interleaved gate and up with biases, as transformers computes them."""
        alpha, limit = config.gemm1_alpha, config.gemm1_clamp_limit
        out = torch.zeros_like(x)
        for expert in range(layer.num_experts):
            tokens, place = (topk_output.topk_ids == expert).nonzero(as_tuple=True)
            gate_up = x[tokens] @ layer.w13_weight[expert] + layer.w13_weight_bias[expert]
            gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
            inner = (up + 1) * gate * torch.sigmoid(alpha * gate)
            weights = topk_output.topk_weights[tokens, place][:, None].to(x.dtype)
            out.index_add_(0, tokens, (inner @ layer.w2_weight[expert] + layer.w2_weight_bias[expert]) * weights)
        return out

    qwen2_moe.fused_gate_sigmoid_mul_add = fused_gate_sigmoid_mul_add
    logits_processor.fused_softcap = softcap
    fused_moe_native.moe_forward_native = moe_forward_native


def attention_with_sinks(rank: int) -> None:
    """gpt-oss on a CPU: attention sinks for SGLang's ``torch_native`` backend, asked for as ``intel_amx``.

    gpt-oss refuses ``torch_native``, which knows no sinks, and accepts ``intel_amx``, whose kernels are not on PyPI.
    """
    import torch
    from sglang.srt.layers.attention import attention_registry, torch_native_backend

    stand_ins(rank)
    plain = torch_native_backend.scaled_dot_product_attention

    class Backend(torch_native_backend.TorchNativeAttnBackend):
        def forward_extend(self, *args: Any, sinks: Any = None, **kwargs: Any) -> Any:
            return self._with(sinks, super().forward_extend, *args, **kwargs)

        def forward_decode(self, *args: Any, sinks: Any = None, **kwargs: Any) -> Any:
            return self._with(sinks, super().forward_decode, *args, **kwargs)

        @staticmethod
        def _with(sinks: Any, run: Any, *args: Any, **kwargs: Any) -> Any:
            def attention(q: Any, k: Any, v: Any, attn_mask: Any = None, **options: Any) -> Any:
                groups = q.shape[1] // k.shape[1]  # [batch, heads, tokens, head_dim]
                k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
                logits = q @ k.transpose(-1, -2) * options["scale"]
                if options.get("is_causal"):
                    attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
                if attn_mask is not None:
                    logits = logits.masked_fill(~attn_mask, float("-inf"))
                sink = sinks.to(logits.dtype)[None, :, None, None].expand(*logits.shape[:-1], 1)
                return torch.cat([logits, sink], -1).softmax(-1)[..., :-1] @ v

            torch_native_backend.scaled_dot_product_attention = attention if sinks is not None else plain
            try:
                return run(*args, **kwargs)
            finally:
                torch_native_backend.scaled_dot_product_attention = plain

    # Without AMX, SGLang puts torch_native in the place of intel_amx after gpt-oss's check.
    attention_registry.ATTENTION_BACKENDS["torch_native"] = Backend
