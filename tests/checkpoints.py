"""Tiny random checkpoints, written as Hugging Face folders without transformers.

Gains are chosen so that attention matters: with the attention output zeroed, logprobs move by more than 1
(``test_parity.py`` checks it), so a wrong head or a wrong row cannot hide below a tolerance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB = 384


@dataclass(frozen=True)
class Tiny:
    """A model: its architecture and the sizes that matter to Shift Parallelism."""

    name: str
    architecture: str
    model_type: str
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 16
    hidden: int = 64
    intermediate: int = 96
    layers: int = 3
    experts: int = 0
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        config = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": VOCAB,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "torch_dtype": "float32",
            "eos_token_id": None,
            "bos_token_id": None,
        }
        return {**config, **self.extra}

    def write(self, folder: Path) -> None:
        """Write the checkpoint, with weights that depend on nothing but its name."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=1))
        save_file(weights(self), folder / "model.safetensors", metadata={"format": "pt"})


DENSE = Tiny("llama", "LlamaForCausalLM", "llama")
FEW_KV_HEADS = Tiny("qwen3-2kv", "Qwen3ForCausalLM", "qwen3", kv_heads=2, qk_norm=True, tied=True)
MOE = Tiny(
    "qwen3-moe",
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    experts=8,
    qk_norm=True,
    extra={
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    },
)
MISTRAL = Tiny("mistral", "MistralForCausalLM", "mistral", extra={"sliding_window": None})
QWEN2 = Tiny("qwen2", "Qwen2ForCausalLM", "qwen2", kv_heads=2, qkv_bias=True, extra={"use_sliding_window": False})
MIXTRAL = Tiny(
    "mixtral",
    "MixtralForCausalLM",
    "mixtral",
    experts=8,
    hidden=128,  # SGLang's Mixtral has no head_dim of its own
    extra={"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
)


def weights(model: Tiny) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(model.name.encode()))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    def vector(size: int, mean: float = 1.0) -> torch.Tensor:
        return mean + 0.1 * torch.randn(size, generator=generator)

    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, model.hidden, generator=generator),
        "model.norm.weight": vector(model.hidden),
    }
    tensors |= _head(model, matrix, vector)
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        tensors |= {
            f"{at}.input_layernorm.weight": vector(model.hidden),
            f"{at}.post_attention_layernorm.weight": vector(model.hidden),
            f"{at}.self_attn.q_proj.weight": matrix(q, model.hidden, 2.0),
            f"{at}.self_attn.k_proj.weight": matrix(kv, model.hidden, 2.0),
            f"{at}.self_attn.v_proj.weight": matrix(kv, model.hidden, 2.0),
            f"{at}.self_attn.o_proj.weight": matrix(model.hidden, q, 2.0),
        }
        if model.qkv_bias:
            for part, size in (("q", q), ("k", kv), ("v", kv)):
                tensors[f"{at}.self_attn.{part}_proj.bias"] = vector(size, 0.0)
        if model.qk_norm:
            tensors[f"{at}.self_attn.q_norm.weight"] = vector(model.head_dim, 1.5)
            tensors[f"{at}.self_attn.k_norm.weight"] = vector(model.head_dim, 1.5)
        tensors |= _ffn(model, at, matrix)
    return tensors


def _head(model: Tiny, matrix: Any, vector: Any) -> dict[str, torch.Tensor]:
    hidden = model.hidden
    if model.architecture.endswith("ForRewardModel"):
        return {
            "score.0.weight": matrix(hidden, hidden),
            "score.0.bias": vector(hidden, 0.0),
            "score.2.weight": matrix(1, hidden, 3.0),
            "score.2.bias": vector(1, 0.0),
        }
    if model.architecture.endswith("ForSequenceClassification"):
        return {"score.weight": matrix(3, hidden, 3.0)}
    return {} if model.tied else {"lm_head.weight": matrix(VOCAB, hidden, 3.0)}


def _ffn(model: Tiny, at: str, matrix: Any) -> dict[str, torch.Tensor]:
    if not model.experts:
        return {
            f"{at}.mlp.gate_proj.weight": matrix(model.intermediate, model.hidden),
            f"{at}.mlp.up_proj.weight": matrix(model.intermediate, model.hidden),
            f"{at}.mlp.down_proj.weight": matrix(model.hidden, model.intermediate),
        }
    mixtral = model.model_type == "mixtral"
    block = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    tensors = {f"{at}.{block}.gate.weight": matrix(model.experts, model.hidden, 2.0)}
    for expert in range(model.experts):
        name = f"{at}.{block}.experts.{expert}"
        tensors[f"{name}.{gate}.weight"] = matrix(model.intermediate, model.hidden)
        tensors[f"{name}.{up}.weight"] = matrix(model.intermediate, model.hidden)
        tensors[f"{name}.{down}.weight"] = matrix(model.hidden, model.intermediate)
    return tensors
