"""What becomes of each SGLang feature under ``--sp-size``, and how that is known. ``docs/support.md`` is printed by
``python -m sgl_shift.features``; a test compares the two, and the refused rows are :data:`sgl_shift.support.RULES`.
"""

from __future__ import annotations

from typing import NamedTuple

from sgl_shift.support import FAMILIES, RULES, SPECULATIVE_ALGORITHMS

WORKS = "works"
EXPECTED = "expected to work"  # read, not run: no CPU can
TO_TP = "stock TP"  # the batch runs in the shift configuration, right by construction


class Feature(NamedTuple):
    name: str
    verdict: str
    run: str = ""  # the test that runs it against stock SGLang
    read: str = ""  # where a CPU cannot run it: the SGLang code that was read


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
        "`python -m sgl_shift.run MODULE` with SGLang's offline benchmarks or the router's `launch_server`",
        WORKS,
        "test_deployments.py",
    ),
    Feature("Token ids outside of the vocabulary", WORKS, "test_features.py"),
    Feature("OpenAI endpoints, streaming, frontend programs, `bench_serving`", WORKS, "test_server.py"),
    Feature("`--config` files, `sglang serve`, Engine, environment variables", WORKS, "test_server.py"),
    Feature("LoRA: batches in which a request has an adapter", TO_TP, "test_features.py"),
    Feature("LoRA: all other batches", WORKS, "test_features.py"),
    Feature("Weight updates and checkpoint-engine at run time", "refused at the request", "test_server.py"),
    Feature("Idle batches", TO_TP, read="scheduler.py:get_idle_batch"),
    Feature("Draft models", TO_TP, read="speculative/*_worker.py: their runners have is_draft_worker set"),
    Feature(
        f"Speculative decoding: {', '.join(sorted(SPECULATIVE_ALGORITHMS))}",
        EXPECTED,
        read="eager_runner.py:_execute_extend (verify is an extend through the same stack, all rows gathered)",
    ),
    Feature("CUDA graphs: batches that were captured", TO_TP, read="decode_cuda_graph_runner.py:execute"),
    Feature(
        "HiCache, PD disaggregation",
        EXPECTED,
        read="mem_cache/hicache_*, disaggregation/*: they copy KV pool rows, which equal stock's",
    ),
    Feature(
        "FP8 KV cache and its scales",
        EXPECTED,
        read="radix_attention.py: scales are the stock layer's, which runs attention",
    ),
    Feature(
        "Quantized checkpoints",
        EXPECTED,
        read="loader.py: loaded twice, as for two TP degrees; both must be legal for the scheme",
    ),
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
        "## Refused at start-up",
        "",
        "| option | why | what works |",
        "|---|---|---|",
        *(f"| `{rule.flag}` | {rule.why} | {rule.works or 'leave it out'} |" for rule in RULES),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
