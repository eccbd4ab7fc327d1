"""What becomes of each SGLang feature under ``--sp-size``, and how that is known. ``docs/support.md`` is printed by
``python -m sgl_shift.features``; a test compares the two, and the refused rows are :data:`sgl_shift.support.RULES`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sgl_shift.support import FAMILIES, RULES, SPECULATIVE_ALGORITHMS

WORKS = "works"
EXPECTED = "expected to work"  # read, not run: no CPU can
TO_TP = "stock TP"  # the batch runs in the shift configuration, right by construction


class Feature(NamedTuple):
    name: str
    verdict: str
    run: str = ""  # the test that runs it against stock SGLang
    read: str = ""  # where a CPU cannot run it: the SGLang code that was read
    option: str = ""  # the attribute of SGLang's resolved arguments that asks for it, if it is one


FEATURES: tuple[Feature, ...] = (
    Feature("Prompt, output, top and token-ids logprobs", WORKS, "test_features.py"),
    Feature("`return_hidden_states`", WORKS, "test_features.py"),
    Feature("Scoring without generation (`max_new_tokens=0`)", WORKS, "test_features.py"),
    Feature("Embedding, reward and classification models", WORKS, "test_features.py"),
    Feature("`input_embeds` requests", WORKS, "test_features.py"),
    Feature("Images: mrope positions, embeddings, deepstack", WORKS, "test_families.py"),
    Feature("Structured output: JSON schema, regex, EBNF", WORKS, "test_features.py"),
    Feature("Penalties, logit bias, stop tokens", WORKS, "test_features.py"),
    Feature("Custom logit processors", WORKS, "test_features.py"),
    Feature("Several answers to one prompt (`n`)", WORKS, "test_features.py"),
    Feature("Sessions", WORKS, "test_features.py"),
    Feature("Priority scheduling", WORKS, "test_features.py"),
    Feature("Pause and continue, in place and with retraction", WORKS, "test_features.py"),
    Feature("Radix prefix cache across switches", WORKS, "test_radix_cache.py"),
    Feature("Chunked prefill, mixed chunks", WORKS, "test_radix_cache.py"),
    Feature(
        "Overlap schedule on and off, page sizes, no radix cache, other schedule policies", WORKS, "test_radix_cache.py"
    ),
    Feature("Retraction for want of KV space, aborts, cache flush", WORKS, "test_radix_cache.py"),
    Feature("Data-parallel replicas (`--dp-size`)", WORKS, "test_parity.py"),
    Feature("Several nodes (`--nnodes`); a warning where base-TP groups cross them", WORKS, "test_nodes.py"),
    Feature("Several tokenizer workers (`--tokenizer-worker-num`)", WORKS, "test_deployments.py"),
    Feature("The SGLang router in front of replicas", WORKS, "test_deployments.py"),
    Feature("gRPC server (`--smg-grpc-mode`, `--grpc-mode`)", WORKS, "test_deployments.py"),
    Feature(
        "gRPC beside HTTP (`--grpc-port`), the Rust servicer (`--servicer-impl rust`), HTTP/2, `SGLANG_RUST_SERVER`",
        EXPECTED,
        read="engine.py:_launch_scheduler_processes starts and compares the ranks of all of these",
    ),
    Feature(
        "`python -m sgl_shift.run`: offline benchmarks (run: `one_batch`), the router's `launch_server`",
        WORKS,
        "test_deployments.py",
    ),
    Feature("Token ids outside of the vocabulary", WORKS, "test_features.py"),
    Feature("OpenAI endpoints, streaming, frontend programs, `bench_serving`", WORKS, "test_server.py"),
    Feature(
        "Prometheus metrics (`--enable-metrics`), also of replicas and of all ranks; profiles (`/start_profile`)",
        WORKS,
        "test_metrics.py",
    ),
    Feature("Request traces (`--enable-trace`)", WORKS, "test_metrics.py"),
    Feature("`--config` files, `sglang serve`, Engine, environment variables", WORKS, "test_server.py"),
    Feature("LoRA: batches in which a request has an adapter", TO_TP, "test_features.py", option="enable_lora"),
    Feature("LoRA: all other batches", WORKS, "test_features.py"),
    Feature("Weight updates at run time: from disk, from tensors, distributed", WORKS, "test_weights.py"),
    Feature(
        "Weight updates at run time: IPC (checkpoint-engine), remote",
        EXPECTED,
        read="managers/scheduler_components/weight_updater.py: written into the stock model, gathered when complete",
    ),
    Feature(
        "Weight updates where the base model has weights of its own (`separate_weights` in `/server_info`)",
        "refused at the request",
        "test_weights.py",
    ),
    Feature("Idle batches", TO_TP, read="scheduler.py:get_idle_batch"),
    Feature(
        "Draft models",
        TO_TP,
        read="speculative/*_worker.py: their runners have is_draft_worker set",
        option="speculative_draft_model_path",
    ),
    Feature(
        f"Speculative decoding: {', '.join(sorted(SPECULATIVE_ALGORITHMS))}",
        EXPECTED,
        run="test_speculation.py",
        read="speculative/*_worker*.py: a verification is an extend of all rows through the same stack",
        option="speculative_algorithm",
    ),
    Feature(
        "Hidden states of inner layers (EAGLE3, `--enable-return-aux-hidden-states`)", WORKS, "test_speculation.py"
    ),
    Feature(
        "CUDA graphs, decode and prefill (breakable), in both configurations",
        EXPECTED,
        run="test_capture.py",
        read="docs/gpu.md: what a graph relies on is run on a CPU, capturing is not",
    ),
    Feature("CUDA graphs with adapters", TO_TP, read="decode_cuda_graph_runner.py:execute", option="enable_lora"),
    Feature(
        "HiCache, PD disaggregation",
        EXPECTED,
        run="test_parity.py",
        read="mem_cache/hicache_*, disaggregation/*: they copy KV pool rows, which equal stock's in every slot",
        option="enable_hierarchical_cache",
    ),
    Feature(
        "Memory released and resumed (`--enable-memory-saver`)",
        EXPECTED,
        run="test_weights.py",
        read="without the memory saver, which needs a GPU, it runs; SchedulerWeightUpdaterManager: the weights lie in "
        "its region, as stock's",
        option="enable_memory_saver",
    ),
    Feature("FP8 and bfloat16 KV caches", WORKS, "test_quantization.py"),
    Feature(
        "Scales of an FP8 KV cache",
        EXPECTED,
        read="radix_attention.py: the stock layer's, which runs attention",
        option="kv_cache_dtype",
    ),
    Feature(
        "KV writes outside of attention (Qwen3-MoE, gpt-oss on CUDA)",
        WORKS,
        run="test_attention_call.py",
        read="models/utils.py:enable_fused_set_kv_buffer, off in base batches",
    ),
    Feature("Quantized checkpoints: block FP8", WORKS, "test_quantization.py"),
    Feature(
        "Quantized checkpoints: FP8 a channel (compressed-tensors) or a tensor",
        EXPECTED,
        run="test_quantization.py",
        read="only what is loaded is run: stock has no CPU kernel for them; fp8_kernel.py, fp8_utils.py",
    ),
    Feature(
        "Quantized checkpoints: other schemes",
        EXPECTED,
        read="loader.py: loaded twice, as for two TP degrees, both of which must be legal for the scheme; stock runs "
        "none on a CPU: their GEMMs (CUTLASS, Marlin, AWQ, GPTQ, bitsandbytes) exist for GPUs or AMX only",
        option="quantization",
    ),
)


def asked_for(arguments: Any) -> list[Feature]:
    """The features that SGLang's resolved ``arguments`` turn on."""
    return [f for f in FEATURES if f.option and getattr(arguments, f.option) not in (None, False, "auto")]


# What SGLang 0.5.23 itself gets wrong or cannot run, seen while comparing with it.
STOCK_LIMITS: tuple[str, ...] = (
    "`Llama4ForCausalLM`: the experts of such a checkpoint are never loaded (`llama4.py` inherits "
    "`llama.py:load_weights`), so it answers at random. `Llama4ForConditionalGeneration`, as the released checkpoints "
    "are named, loads them",
    "Olmo2 with fewer KV heads than ranks: its norm of K over all heads does not expect replicated ones",
    "a token id outside of the vocabulary ends a server without TP; with TP it embeds to zeros, and so it does here",
    "on a CPU, replaced in the tests by torch for stock and for this alike (`tests/families.py`): Qwen2-MoE's "
    "shared-expert gate, Gemma2's soft cap, Llama4's router weight on the input, gpt-oss' experts and sinks, pinned "
    "memory of LoRA; and Llama4's norm of Q and K, which is bfloat16 only, is left out",
)


def markdown() -> str:
    """``docs/support.md``."""
    lines = [
        "# What works, what runs in stock TP, what is refused",
        "",
        "Printed by `python -m sgl_shift.features`; do not edit. *Run* names the test that compares with stock SGLang",
        "on a CPU; *read* the SGLang code that was read where a CPU cannot run the feature.",
        "",
        "## Model families",
        "",
        "| family | architectures | |",
        "|---|---|---|",
        *(f"| {family} | {', '.join(f'`{a}`' for a in names)} | works |" for family, names in FAMILIES.items()),
        "| any other | | refused, unless `--shift-allow-untested-model` |",
        "| multi-head latent attention | | refused: its one latent KV head cannot be split |",
        "",
        "Run in `tests/test_parity.py` and `tests/test_families.py`: base, shift and switches, against stock.",
        "",
        "## Features",
        "",
        "| feature | | run | read |",
        "|---|---|---|---|",
        *(f"| {f.name} | {f.verdict} | {f'`{f.run}`' if f.run else ''} | {f.read} |" for f in FEATURES),
        "",
        "## What stock SGLang cannot do",
        "",
        *(f"* {limit}" for limit in STOCK_LIMITS),
        "",
        "## Refused at start-up",
        "",
        "| option | why | what works |",
        "|---|---|---|",
        *(f"| `{rule.flag}` | {rule.why} | {rule.works or 'leave it out'} |" for rule in RULES),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
