"""What Shift Parallelism supports: one table, enforced before any weight is loaded.

``ARCHITECTURES`` is what the test suite runs in both configurations. ``RULES`` names each SGLang option that cannot be
combined with ``--sp-size``, and why. Nothing that is asked for is ignored: it works, or it is refused here.
The rules read SGLang's *resolved* arguments as plain attributes, so that this module needs no SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

# Family -> architectures, as config.json names them.
FAMILIES: dict[str, tuple[str, ...]] = {
    "Llama": ("LlamaForCausalLM",),
    "Mistral": ("MistralForCausalLM",),
    "Phi3": ("Phi3ForCausalLM",),
    "Qwen2": ("Qwen2ForCausalLM",),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM",),
    "Qwen3": ("Qwen3ForCausalLM",),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM",),
    "Mixtral": ("MixtralForCausalLM",),
    "Gemma2": ("Gemma2ForCausalLM",),
    "Gemma3 text": ("Gemma3ForCausalLM",),
    "GLM4": ("Glm4ForCausalLM",),
    "Olmo2": ("Olmo2ForCausalLM",),
    "Cohere": ("CohereForCausalLM",),
    "Granite": ("GraniteForCausalLM",),
    "Llama4 text": ("Llama4ForConditionalGeneration",),
    "gpt-oss": ("GptOssForCausalLM",),
    "Qwen2.5-VL": ("Qwen2_5_VLForConditionalGeneration",),
    "Qwen3-VL": ("Qwen3VLForConditionalGeneration",),
    "Reward and classification": ("Qwen2ForRewardModel", "LlamaForSequenceClassification"),
}
ARCHITECTURES: frozenset[str] = frozenset(name for names in FAMILIES.values() for name in names)

# Backends whose forward reads head counts from the layer it is given and not from the parallel state.
ATTENTION_BACKENDS: frozenset[str] = frozenset(
    {"flashinfer", "fa3", "triton", "trtllm_mha", "torch_native", "intel_amx"}
)

# Loaders that read a whole checkpoint and shard it themselves, so that they can serve two TP degrees.
LOAD_FORMATS: frozenset[str] = frozenset(
    {"auto", "pt", "safetensors", "npcache", "dummy", "mistral", "fastsafetensors"}
)

SPECULATIVE_ALGORITHMS: frozenset[str] = frozenset({"NGRAM", "STANDALONE", "EAGLE", "EAGLE3"})


class RefusedError(ValueError):
    """A deployment that Shift Parallelism cannot serve: what was asked, why not, and what works."""


class Rule(NamedTuple):
    """An SGLang option, the values of it that are refused, and the reason."""

    option: str  # attribute of the resolved arguments
    refused: Callable[[Any], bool]
    why: str
    works: str = ""  # the nearest option value that works; by default, leaving the option out

    @property
    def flag(self) -> str:
        return "--" + self.option.replace("_", "-")

    def explain(self, value: Any) -> str:
        asked = self.flag if value is True else f"{self.flag} {value}"
        return f"{asked}: {self.why}; {self.works or f'leave out {self.flag}'}"


def above(limit: int) -> Callable[[Any], bool]:
    return lambda value: value is not None and value > limit


def given(value: Any) -> bool:
    return bool(value)


def neither(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in allowed


_SPLITS_TOKENS = "it already divides tokens or KV cache between ranks, in another layout"
_GROUPS = "it re-groups ranks that Shift Parallelism groups itself"
_MOE_ROWS = "its buffers and counters are sized for every rank holding the whole batch"
_ONE_COPY = "it manages one copy of the weights, Shift Parallelism holds two"

RULES: tuple[Rule, ...] = (
    Rule("pp_size", above(1), "pipeline stages would hand slices of the batch to each other", "use --pp-size 1"),
    Rule("enable_dp_attention", given, _GROUPS),
    Rule("attn_dp_size", above(1), _GROUPS, "use --dp-size for whole replicas"),
    Rule("attn_cp_size", above(1), _SPLITS_TOKENS),
    Rule("dcp_size", above(1), _SPLITS_TOKENS),
    Rule("enable_prefill_cp", given, _SPLITS_TOKENS),
    Rule("enable_kv_cache_sharding", given, _SPLITS_TOKENS),
    Rule("enable_layernorm_sp", given, _SPLITS_TOKENS),
    Rule("enable_attn_tp_input_scattered", given, _SPLITS_TOKENS),
    Rule("enable_scattered_sconv", given, _SPLITS_TOKENS),
    Rule("disable_attn_tp_gather", given, _SPLITS_TOKENS),
    Rule("dwdp_size", above(1), _GROUPS),
    Rule("moe_dp_size", above(1), _GROUPS),
    Rule("moe_dense_tp_size", given, _GROUPS),
    Rule("enable_dense_mlp_attn_tp", given, _GROUPS),
    Rule("enable_shared_experts_attn_tp", given, _GROUPS),
    Rule("shared_experts_tp_size", given, _GROUPS),
    Rule("ep_size", above(1), "expert parallelism dispatches rows over all ranks", "use --ep-size 1"),
    Rule("moe_a2a_backend", neither("none"), _MOE_ROWS, "use --moe-a2a-backend none"),
    Rule("ep_num_redundant_experts", above(0), _MOE_ROWS),
    Rule("enable_eplb", given, _MOE_ROWS),
    Rule("expert_distribution_recorder_mode", given, _MOE_ROWS),
    Rule("enable_return_routed_experts", given, _MOE_ROWS),
    Rule("enable_return_indexer_topk", given, _MOE_ROWS),
    Rule("enable_fused_moe_sum_all_reduce", given, "it reduces inside a kernel over a group of its own"),
    Rule("elastic_ep_backend", neither("none"), "the set of ranks would change under the SP groups"),
    Rule("enable_two_batch_overlap", given, "it splits the batch in two behind the decision"),
    Rule("enable_single_batch_overlap", given, "it splits the batch in two behind the decision"),
    Rule("enable_pdmux", given, "it runs prefill and decode on separate streams and groups"),
    Rule("enable_torch_compile", given, "Dynamo would trace through the switch between the configurations"),
    Rule(
        "enable_deterministic_inference",
        given,
        "the two configurations sum in a different order, so an answer depends on the batch",
        "use --shift-mode tp",
    ),
    Rule("rl_on_policy_target", given, "the two configurations sum in a different order"),
    Rule("cpu_offload_gb", above(0), _ONE_COPY),
    Rule("offload_group_size", above(0), _ONE_COPY),
    Rule("ple_offload_embedding", given, _ONE_COPY),
    Rule("kt_weight_path", given, _ONE_COPY),
    Rule("enable_paged_experts", given, _ONE_COPY),
    Rule("weight_cache_mode", neither("off"), _ONE_COPY, "use --weight-cache-mode off"),
    Rule("startup_weight_load_mode", neither("serial"), _ONE_COPY, "use --startup-weight-load-mode serial"),
    Rule("custom_weight_loader", given, _ONE_COPY),
    Rule("checkpoint_engine_wait_weights_before_ready", given, _ONE_COPY),
    Rule("remote_instance_weight_loader_start_seed_via_transfer_engine", given, _ONE_COPY),
    Rule("quantize_and_serve", given, "quantizing while loading is not tested for two models"),
    Rule("modelopt_quant", given, "quantizing while loading is not tested for two models"),
    Rule("modelopt_checkpoint_restore_path", given, "quantizing while loading is not tested for two models"),
    Rule("modelopt_checkpoint_save_path", given, "quantizing while loading is not tested for two models"),
    Rule(
        "load_format",
        neither(*LOAD_FORMATS),
        "it delivers weights already cut for one TP degree, or is not tested with two",
        "use --load-format auto",
    ),
    Rule("enable_symm_mem", given, "symmetric buffers are registered per group"),
    Rule("enable_torch_symm_mem", given, "symmetric buffers are registered per group"),
    Rule("enable_mscclpp", given, "its buffers are registered per group"),
    Rule("enable_quant_communications", given, "quantized all-reduces are not tested on the base groups"),
    Rule("enable_nvidia_megakernel", given, "it replaces the decoder stack that the base configuration needs"),
    Rule("enable_amd_monokernel", given, "it replaces the decoder stack that the base configuration needs"),
    Rule("enable_hisparse", given, "it keeps KV outside the cache that both configurations share"),
    Rule("prefill_only_disable_kv_cache", given, "the shared KV cache is what Shift Parallelism rests on"),
    Rule("kv_canary", neither("none"), "its checks follow the stock attention calls only", "use --kv-canary none"),
    Rule("debug_tensor_dump_output_folder", given, "it would dump the stock model's layers only"),
    Rule("msprobe_dump_config", given, "it would dump the stock model's layers only"),
    Rule("forward_hooks", given, "they would run on the stock model's layers only"),
    Rule("dllm_algorithm", given, "diffusion models decode blocks by another loop"),
    Rule(
        "speculative_algorithm",
        neither(*SPECULATIVE_ALGORITHMS),
        "it runs graphs of its own",
        f"use one of {', '.join(sorted(SPECULATIVE_ALGORITHMS))}, or none",
    ),
    Rule("encoder_only", given, "an encoder has no KV cache to share"),
    Rule("use_ray", given, "the Ray launcher does not hand the configuration to its actors", "start without --use-ray"),
    Rule("model_impl", neither("auto", "sglang"), "only SGLang's own models are tested", "use --model-impl auto"),
    *(
        Rule(
            option,
            neither(*ATTENTION_BACKENDS),
            "it has not been read for head counts taken from the parallel state",
            f"use one of {', '.join(sorted(ATTENTION_BACKENDS))}",
        )
        for option in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    ),
)


def refusals(arguments: Any, rules: Iterable[Rule] = RULES) -> list[str]:
    """Every option in SGLang's resolved ``arguments`` that cannot be combined with ``--sp-size``, explained.

    An option that this SGLang does not know is not among them; that it should is checked by the test suite.
    """
    values = ((rule, getattr(arguments, rule.option, None)) for rule in rules)
    return [rule.explain(value) for rule, value in values if rule.refused(value)]


def refuse_architecture(architecture: str, *, is_mla: bool, allow_untested: bool) -> str | None:
    """Why a model architecture cannot run with Shift Parallelism, or None."""
    if is_mla:
        return (
            f"{architecture} uses multi-head latent attention: its one latent KV head cannot be split over SP ranks; "
            "leave out --sp-size"
        )
    if architecture not in ARCHITECTURES and not allow_untested:
        return (
            f"{architecture} is not among the architectures tested with Shift Parallelism "
            f"({', '.join(FAMILIES)}); leave out --sp-size, or accept the risk of wrong answers with "
            "--shift-allow-untested-model"
        )
    return None
