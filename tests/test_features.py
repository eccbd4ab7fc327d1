"""SGLang's features under Shift Parallelism: each is asked of stock and of ours, in both configurations, and compared.

A feature here is a function that runs in the engine's process and returns plain values.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from sgl_shift import demo
from tests import parity
from tests.checkpoints import DENSE, QWEN2, VOCAB, weights
from tests.hosting import Host
from tests.parity import Requests

ENGINE = {
    "enable_return_hidden_states": True,
    "enable_custom_logit_processor": True,
    "enable_priority_scheduling": True,
    "enable_streaming_session": True,
    "sleep_on_idle": True,
}
# All base, all shift, and a switch between prefill and decode.
WAYS = ({"mode": "sp"}, {"mode": "tp"}, {"mode": "shift", "threshold": 8})

PROMPTS = Requests.random(21, [40, 9, 23], [0, 0, 0]).prompts


def greedy(max_new_tokens: int = 6, **options: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": max_new_tokens, **options}


def request(engine: Any, **fields: Any) -> Any:
    """One request with every field that SGLang's own request type has; the Engine's method lacks some."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def run() -> Any:
        async for answer in engine.tokenizer_manager.generate_request(GenerateReqInput(**fields), None):
            last = answer
        return last

    return engine.loop.run_until_complete(run())


def meta(answer: dict[str, Any], *names: str) -> list[Any]:
    return [answer["output_ids"], *(answer["meta_info"][name] for name in names)]


# --- the features ---


def logprobs_of_every_kind(engine: Any) -> Any:
    answers = engine.generate(
        input_ids=PROMPTS,
        sampling_params=greedy(),
        return_logprob=[True, True, False],
        logprob_start_len=[0, 5, -1],
        top_logprobs_num=[3, 0, 0],
        token_ids_logprob=[[7, 11], None, None],
    )
    names = ("input_token_logprobs", "output_token_logprobs")
    tops = ("input_top_logprobs", "output_top_logprobs", "input_token_ids_logprobs", "output_token_ids_logprobs")
    return [meta(answers[0], *names, *tops), meta(answers[1], *names), meta(answers[2])]


def hidden_states(engine: Any) -> Any:
    answers = engine.generate(input_ids=PROMPTS, sampling_params=greedy(3), return_hidden_states=True)
    return [meta(answer, "hidden_states") for answer in answers]


def penalties_bias_and_stops(engine: Any) -> Any:
    params = [
        greedy(10, frequency_penalty=0.9, presence_penalty=0.5),
        greedy(10, repetition_penalty=1.3, stop_token_ids=[3, 5, 7, 11, 13, 17]),
        greedy(10, logit_bias={"42": 60.0}),
    ]
    return [meta(a, "finish_reason") for a in engine.generate(input_ids=PROMPTS, sampling_params=params)]


def several_answers_to_one_prompt(engine: Any) -> Any:
    return [a["output_ids"] for a in engine.generate(input_ids=PROMPTS[0], sampling_params=greedy(n=3))]


def custom_logit_processor(engine: Any) -> Any:
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    allowed = {"token_ids": list(range(0, VOCAB, 2))}  # even tokens are not
    answer = engine.generate(
        input_ids=PROMPTS[0],
        sampling_params=greedy(custom_params=allowed),
        custom_logit_processor=DisallowedTokensLogitsProcessor().to_str(),
    )
    assert all(token % 2 for token in answer["output_ids"])
    return answer["output_ids"]


def priorities(engine: Any) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    async def one(index: int) -> Any:
        fields = {"input_ids": PROMPTS[index % 3], "sampling_params": greedy(4), "priority": index % 2}
        async for answer in engine.tokenizer_manager.generate_request(GenerateReqInput(**fields), None):
            last = answer
        return last["output_ids"]

    async def all_of_them() -> Any:
        return await asyncio.gather(*(one(i) for i in range(6)))

    return engine.loop.run_until_complete(all_of_them())


def session(engine: Any) -> Any:
    name = engine.open_session(capacity_of_str_len=2000)
    turns, rid = [], None
    for turn in range(3):
        answer = engine.generate(
            input_ids=PROMPTS[turn],
            sampling_params=greedy(4),
            session_params={"id": name, "rid": rid, "offset": -1, "replace": False},
        )
        rid = answer["meta_info"]["id"]
        turns.append(meta(answer, "prompt_tokens", "cached_tokens"))
    engine.close_session(name)
    return turns


def prefill_only(engine: Any) -> Any:
    """Scoring: no token is generated."""
    answers = engine.generate(input_ids=PROMPTS, sampling_params=greedy(0), return_logprob=True, logprob_start_len=0)
    return [a["meta_info"]["input_token_logprobs"] for a in answers]


def ids_outside_of_the_vocabulary(engine: Any) -> Any:
    """SGLang lets them through; the server must not end with them."""
    return engine.generate(input_ids=[*PROMPTS[0], VOCAB + 5, 1 << 20], sampling_params=greedy())["output_ids"]


def pause_and_continue(engine: Any) -> Any:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, GenerateReqInput, PauseGenerationReqInput

    manager = engine.tokenizer_manager

    async def generate(index: int) -> Any:
        fields = {"input_ids": PROMPTS[index], "sampling_params": greedy(20)}
        async for answer in manager.generate_request(GenerateReqInput(**fields), None):
            last = answer
        return last["output_ids"]

    async def run(mode: str) -> Any:
        tasks = [asyncio.ensure_future(generate(i)) for i in range(3)]
        await asyncio.sleep(0.1)
        await manager.pause_generation(PauseGenerationReqInput(mode=mode))
        await asyncio.sleep(0.2)
        await manager.continue_generation(ContinueGenerationReqInput())
        return await asyncio.gather(*tasks)

    return [engine.loop.run_until_complete(run(mode)) for mode in ("in_place", "retract")]


FEATURES = (
    logprobs_of_every_kind,
    hidden_states,
    penalties_bias_and_stops,
    several_answers_to_one_prompt,
    custom_logit_processor,
    priorities,
    session,
    prefill_only,
    ids_outside_of_the_vocabulary,
    pause_and_continue,
)


@pytest.fixture(scope="module")
def engines(checkpoint, tmp_path_factory) -> Iterator[tuple[Host, Host]]:
    folder = tmp_path_factory.mktemp("features")
    model = checkpoint(DENSE)
    with (
        Host(model, 2, plugin=False, log=folder / "stock.log", **ENGINE) as stock,
        Host(model, 2, sp_size=2, log=folder / "ours.log", **ENGINE) as ours,
    ):
        yield stock, ours


@pytest.mark.parametrize("feature", FEATURES, ids=lambda f: f.__name__)
def test_feature(feature, engines):
    stock, ours = engines
    stock.flush_cache()
    expected = stock.call(feature)
    for settings in WAYS:
        ours.set(**settings)
        ours.flush_cache()
        before = ours.info()["tokens"]
        parity.assert_close(expected, ours.call(feature), feature.__name__)
        ran = {name: count - before[name] for name, count in ours.info()["tokens"].items()}
        assert (ran["base"] > 0) == (settings["mode"] != "tp"), ran
        assert ran["shift"] == 0 or settings["mode"] != "sp", ran


# --- features that take an engine of their own ---


def test_input_embeds(checkpoint, start):
    """SGLang makes them bfloat16 whatever the dtype, so the model is bfloat16 as well, and the comparison coarse."""
    rng = random.Random(4)
    embeds = [[rng.gauss(0, 1) for _ in range(DENSE.hidden)] for _ in range(30)]
    engine = {"dtype": "bfloat16", "disable_radix_cache": True}

    def ask(host: Host) -> Any:
        return host.call(_embeds, embeds)

    expected = ask(start(DENSE, 2, plugin=False, **engine))
    host = start(DENSE, 2, sp_size=2, shift_mode="sp", **engine)
    ours = ask(host)
    assert host.info()["tokens"]["shift"] == 0
    assert abs(expected - ours) < 0.1
    assert abs(expected - host.call(_embeds, [[0.0] * DENSE.hidden] * 30)) > 0.2  # what ignored embeddings would give


def _embeds(engine: Any, embeds: list[list[float]]) -> float:
    answer = request(engine, input_embeds=embeds, sampling_params=greedy(1), return_logprob=True)
    return answer["meta_info"]["output_token_logprobs"][0][0]


EMBEDDING = dataclasses.replace(QWEN2, name="qwen2-embedding")
REWARD = dataclasses.replace(QWEN2, name="qwen2-reward", architecture="Qwen2ForRewardModel")
CLASSIFIER = dataclasses.replace(
    DENSE,
    name="llama-classifier",
    architecture="LlamaForSequenceClassification",
    extra={"id2label": {"0": "a", "1": "b", "2": "c"}},
)


@pytest.mark.parametrize("model", [EMBEDDING, REWARD, CLASSIFIER], ids=lambda m: m.name)
def test_embedding_reward_and_classification_models(model, start):
    expected = start(model, 2, plugin=False, is_embedding=True).call(_encode)
    host = start(model, 2, sp_size=2, is_embedding=True, shift_mode="sp")
    parity.assert_close(expected, host.call(_encode), model.name)
    assert host.info()["tokens"]["shift"] == 0
    host.set(mode="shift", threshold=25)
    host.flush_cache()
    parity.assert_close(expected, host.call(_encode), model.name)


def _encode(engine: Any) -> Any:
    from sglang.srt.managers.io_struct import EmbeddingReqInput

    async def run(prompt: list[int]) -> Any:
        async for answer in engine.tokenizer_manager.generate_request(EmbeddingReqInput(input_ids=prompt), None):
            last = answer
        return last["embedding"]

    return [engine.loop.run_until_complete(run(prompt)) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A LoRA adapter for DENSE that changes answers."""
    folder = tmp_path_factory.mktemp("adapter")
    targets, rank = ["q_proj", "v_proj", "o_proj", "down_proj"], 4
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, weight in weights(DENSE).items():
        if any(target in name for target in targets):
            out, into = weight.shape
            at = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{at}.lora_A.weight"] = torch.randn(rank, into, generator=generator) / into**0.5
            tensors[f"{at}.lora_B.weight"] = torch.randn(out, rank, generator=generator) * 0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def without_pinned_memory(_rank: int) -> None:
    """SGLang's LoRA code pins memory, which needs a CUDA driver. For stock and for us alike."""
    for name in ("tensor", "empty", "zeros", "arange"):
        original = getattr(torch, name)
        setattr(torch, name, lambda *a, _original=original, **k: _original(*a, **{**k, "pin_memory": False}))
    torch.Tensor.pin_memory = lambda self, *a, **k: self


def test_batches_with_an_adapter_run_in_stock_tp(adapter, start):
    lora = {"enable_lora": True, "lora_paths": {"tuned": str(adapter)}, "lora_backend": "torch_native"}
    lora["in_rank"] = without_pinned_memory
    stock = start(DENSE, 2, plugin=False, **lora)
    plain, tuned, mixed = (stock.call(_with_adapters, a) for a in ([None] * 3, ["tuned"] * 3, [None, "tuned", None]))
    stock.close()
    assert plain != tuned
    host = start(DENSE, 2, sp_size=2, shift_mode="sp", **lora)
    parity.assert_close(plain, host.call(_with_adapters, [None] * 3), "plain")
    before = host.info()["tokens"]
    assert before["shift"] == 0
    assert before["base"] > 0
    parity.assert_close(tuned, host.call(_with_adapters, ["tuned"] * 3), "tuned")
    after = host.info()["tokens"]
    assert after["base"] == before["base"]
    assert after["shift"] > 0
    parity.assert_close(mixed, host.call(_with_adapters, [None, "tuned", None]), "mixed")


def _with_adapters(engine: Any, adapters: list[str | None]) -> Any:
    engine.flush_cache()
    answers = engine.generate(
        input_ids=PROMPTS, sampling_params=greedy(4), lora_path=adapters, return_logprob=True, logprob_start_len=0
    )
    return [meta(answer, "input_token_logprobs", "output_token_logprobs") for answer in answers]


def test_structured_output(tmp_path):
    """JSON schema, regular expression and EBNF, on the demo model, which has a tokenizer."""
    engine = {"skip_tokenizer_init": False, "log": tmp_path / "log"}
    with Host(demo.model_folder(), demo.WORLD_SIZE, plugin=False, **engine) as stock:
        expected = stock.call(_structured)
    with Host(demo.model_folder(), demo.WORLD_SIZE, sp_size=3, shift_mode="sp", **engine) as host:
        assert host.call(_structured) == expected
        assert host.info()["tokens"]["shift"] == 0
    assert json.loads(expected[0])["age"] >= 0
    assert re.fullmatch(r"[0-9]{3}-[a-z]{2}", expected[1])
    assert expected[2] in ("yes", "no")


def _structured(engine: Any) -> list[str]:
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["age"],
    }
    params = [
        greedy(16, json_schema=json.dumps({**schema, "additionalProperties": False})),
        greedy(16, regex="[0-9]{3}-[a-z]{2}"),
        greedy(8, ebnf='root ::= "yes" | "no"'),
    ]
    prompts = ["A child as JSON with its age:", "A code of three digits and two letters:", "Is snow white?"]
    return [answer["text"] for answer in engine.generate(prompts, params)]
