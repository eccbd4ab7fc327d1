"""What a model's ``config.json`` says about its size: weights, heads, experts, dtypes. No torch, no SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sgl_shift.weights import Checkpoint

ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2}


class ShapeError(ValueError):
    """A ``config.json`` that the cost model cannot read; the message says what is missing."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with grouped-query attention and gated MLPs, dense or mixture of experts.

    Attributes:
        itemsize: bytes of an activation, and of a weight that is not quantized.
        linear_itemsize: bytes of a weight of a linear layer; embedding and LM head are never quantized.
        fp8: weights and activations of linear layers are FP8, so FP8 tensor cores apply where there are some.
        stored_as: dtype of quantized weights in the checkpoint, as safetensors name it; empty without.
        kv_itemsize: bytes of an element of the KV cache.
        moe_layers: how many of ``layers`` have experts; the others have a dense MLP of width ``intermediate``.
        shared_intermediate: width of the shared experts of a MoE layer, 0 without.
        local_layers: how many layers attend to at most ``window`` tokens.
        files: sizes of the checkpoint's files, where they are at hand; otherwise they follow from the rest.
    """

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    tied: bool = False
    itemsize: int = 2
    linear_itemsize: float = 2
    fp8: bool = False
    stored_as: str = ""
    kv_itemsize: int = 2
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    moe_layers: int = 0
    window: int = 0
    local_layers: int = 0
    mla: bool = False
    files: Checkpoint | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, fp8: bool = False, fp8_kv: bool = False) -> ModelShape:
        """Read a Hugging Face ``config.json``.

        Args:
            fp8: the weights will be quantized to FP8 when they are loaded (``--quantization fp8``).
            fp8_kv: ``--kv-cache-dtype fp8_e4m3``.

        Raises:
            ShapeError: a size is missing.
        """
        text = {**config, **(config.get("text_config") or {})}
        architecture = (config.get("architectures") or ["unknown"])[0]

        def size(*names: str) -> int:
            for name in names:
                if isinstance(text.get(name), int):
                    return int(text[name])
            raise ShapeError(f"config.json has no {' or '.join(names)}: not a decoder that the cost model knows")

        hidden, layers, heads = size("hidden_size"), size("num_hidden_layers"), size("num_attention_heads")
        itemsize = ITEMSIZE.get(str(text.get("torch_dtype") or text.get("dtype") or "bfloat16"), 2)
        stored = config.get("quantization_config") or {}
        bits, is_fp8 = (8, True) if fp8 else _quantization(stored, itemsize)
        experts = text.get("num_local_experts") or text.get("num_experts") or text.get("n_routed_experts") or 0
        # Llama4 names the width of the experts intermediate_size and that of its dense layers intermediate_size_mlp.
        dense_width = text.get("intermediate_size_mlp") or size("intermediate_size", "moe_intermediate_size")
        expert_width = text.get("moe_intermediate_size") or text.get("intermediate_size") or 0
        shared = text.get("shared_expert_intermediate_size") or 0
        if architecture.startswith("Llama4"):
            shared = expert_width
        window, local = _local_attention(text, layers)
        return cls(
            architecture=architecture,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or hidden // heads,
            intermediate=dense_width,
            vocabulary=size("vocab_size"),
            tied=bool(text.get("tie_word_embeddings", False)),
            itemsize=itemsize,
            linear_itemsize=bits / 8,
            fp8=is_fp8,
            # What is quantized while it is loaded is a copy in each configuration, like formats that are repacked.
            stored_as="" if not (fp8 or stored) else "F8_E4M3" if is_fp8 and not fp8 else "other",
            kv_itemsize=1 if fp8_kv else itemsize,
            experts=experts,
            experts_per_token=(text.get("num_experts_per_tok") or 1) if experts else 0,
            moe_intermediate=expert_width if experts else 0,
            shared_intermediate=shared if experts else 0,
            moe_layers=_moe_layers(text, layers) if experts else 0,
            window=window,
            local_layers=local,
            mla="kv_lora_rank" in text,
        )

    @classmethod
    def from_path(cls, path: Path, **options: bool) -> ModelShape:
        """Read ``config.json`` in a folder, or a file in that format.

        Raises:
            ShapeError: there is none.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
        except (OSError, ValueError) as error:
            raise ShapeError(f"{file}: {error}; --model-path is a folder with a config.json, or such a file") from None
        shape = cls.from_config(config, **options)
        stored = Checkpoint.in_folder(path, shape.itemsize) if path.is_dir() and not options.get("fp8") else None
        return replace(shape, files=stored)

    @property
    def attention_weights(self) -> int:
        """Elements of Q, K, V and O of a layer."""
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def expert_weights(self) -> int:
        """Elements of one routed expert."""
        return 3 * self.hidden * self.moe_intermediate

    @property
    def dense_weights(self) -> int:
        """Elements of all linear layers that every token passes through, experts and LM head apart."""
        dense = 3 * self.hidden * self.intermediate * (self.layers - self.moe_layers)
        shared = (3 * self.hidden * self.shared_intermediate + self.hidden * self.experts) * self.moe_layers
        return self.attention_weights * self.layers + dense + shared

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def checkpoint(self) -> Checkpoint:
        """Bytes of the weights as they are loaded; without files, norms are left out (less than 0.1%)."""
        if self.files:
            return self.files
        experts = self.expert_weights * self.experts * self.moe_layers
        linear = (self.dense_weights + experts) * self.linear_itemsize
        head = self.head_weights * self.itemsize
        stack = int(linear + head)  # with the embedding, which is as large as the LM head
        dense = self.intermediate * (self.layers - self.moe_layers) + self.shared_intermediate * self.moe_layers
        columns = self.hidden * (self.heads * self.head_dim * self.layers + dense)  # O and down
        return Checkpoint(
            total=stack + (0 if self.tied else head),
            stack=stack,
            experts=int(experts * self.linear_itemsize),
            columns=int(columns * self.linear_itemsize),
            dtypes=frozenset({self.stored_as} - {""}),
        )


def _quantization(config: Mapping[str, Any], itemsize: int) -> tuple[float, bool]:
    """Bits of a weight and whether the arithmetic is FP8.

    Raises:
        ShapeError: a method whose size is not known.
    """
    method = str(config.get("quant_method", "") or config.get("quant_algo", "")).lower()
    if not method:
        return itemsize * 8, False
    if method in ("fp8", "fbgemm_fp8", "modelopt_fp8"):
        return 8, True
    if method == "mxfp4":
        return 4.25, False  # a scale byte for 32 weights
    if method in ("awq", "gptq", "gptq_marlin", "awq_marlin"):
        return float(config.get("bits", config.get("w_bit", 4))), False
    if method == "compressed-tensors":
        group: Mapping[str, Any] = next(iter(config.get("config_groups", {}).values()), {})
        weights = group.get("weights") or {}
        bits = float(weights.get("num_bits", 8))
        return bits, bits == 8 and weights.get("type") == "float" and bool(group.get("input_activations"))
    raise ShapeError(f"quantization method {method!r}: the cost model does not know its weight size")


def _moe_layers(text: Mapping[str, Any], layers: int) -> int:
    if "interleave_moe_layer_step" in text:  # Llama4
        return layers // (text["interleave_moe_layer_step"] or 1)
    step, dense = text.get("decoder_sparse_step") or 1, set(text.get("mlp_only_layers") or ())  # Qwen2-MoE, Qwen3-MoE
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))


def _local_attention(text: Mapping[str, Any], layers: int) -> tuple[int, int]:
    """Window, and how many layers have it."""
    types = text.get("layer_types") or ()
    if text.get("attention_chunk_size"):  # Llama4: three of four layers attend within chunks, to half of one on average
        local = sum(kind == "chunked_attention" for kind in types) or layers - layers // 4
        return text["attention_chunk_size"] // 2, local
    window = text.get("sliding_window") or 0
    if not window or text.get("use_sliding_window") is False:
        return 0, 0
    if types:
        return window, sum(kind == "sliding_attention" for kind in types)
    if text.get("sliding_window_pattern"):  # Gemma3: every n-th layer is global
        return window, layers - layers // text["sliding_window_pattern"]
    return window, layers // 2 if text.get("model_type") == "gemma2" else layers
