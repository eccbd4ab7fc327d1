"""Model families beyond those of ``test_parity.py``: base and shift against stock, with the TP and SP degrees mixed.

The long tier (``pytest -m long``) adds the plainer families, SP alone, and KV heads that are replicated.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests import parity
from tests.checkpoints import DENSE, MISTRAL, MIXTRAL, MOE, QWEN2
from tests.families import (
    COHERE,
    FAMILIES,
    GEMMA2,
    GEMMA3,
    GPT_OSS,
    LLAMA4,
    OLMO2,
    QWEN2_MOE,
    Family,
    attention_with_sinks,
    stand_ins,
)
from tests.parity import Requests, assert_close
from tests.test_parity import forget_moe_tp_group, replicate_the_wrong_kv_head, swap_two_heads
from tests.vision import QWEN2_5_VL, QWEN3_VL, look_at_images

REQUESTS = Requests.random(1, [33, 5, 1, 90], [5, 3, 6, 2])


def arguments(family: Family) -> dict[str, Any]:
    if family.config_class == GPT_OSS.config_class:
        return {"attention_backend": "intel_amx", "in_rank": attention_with_sinks}
    return {"in_rank": stand_ins}


def check(family: Family, world: int, sp: int, start) -> None:
    stock = start(family, world, plugin=False, **arguments(family))
    expected = parity.run(stock, REQUESTS)
    stock.close()
    host = start(family, world, sp_size=sp, shift_mode="sp", **arguments(family))
    worst = parity.assert_equal(expected, parity.run(host, REQUESTS))
    assert host.info()["tokens"]["shift"] == 0
    host.set(mode="shift", threshold=3)
    host.flush_cache()
    worst = max(worst, parity.assert_equal(expected, parity.run(host, REQUESTS)))
    assert host.info()["tokens"]["shift"] > 0
    print(f"{family.name} P={world} SP={sp}: worst logprob difference {worst:.1e}")
    host.close()


# Those that ask something of Shift Parallelism that the models of test_parity.py do not.
SPECIAL = (QWEN2_MOE, GEMMA3, COHERE, LLAMA4, GPT_OSS)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[] if f in SPECIAL else pytest.mark.long) for f in FAMILIES], ids=lambda f: f.name
)
def test_family(family, start):
    check(family, 4, 2, start)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_family_with_sp_alone(family, start):
    check(family, 2, 2, start)


# Stock Olmo2 gathers K over the TP group to normalize it whole, and fails where ranks share a KV head.
REPLICABLE = [family for family in FAMILIES if family is not OLMO2]


@pytest.mark.long
@pytest.mark.parametrize("family", REPLICABLE, ids=lambda f: f.name)
@pytest.mark.parametrize("sp", [4, 2])
def test_family_with_replicated_kv_heads(family, sp, start):
    check(family.with_kv_heads(2 if sp == 4 else 1), 4, sp, start)


WITH_EXPERTS = (QWEN2_MOE, LLAMA4, GPT_OSS, MOE, MIXTRAL)


@pytest.mark.long
@pytest.mark.parametrize("family", [*FAMILIES, DENSE, MOE, MISTRAL, QWEN2, MIXTRAL], ids=lambda f: f.name)
def test_faults_turn_a_family_red(family, start):
    """The negative controls of the parity suite: heads and experts with SP and TP mixed, KV heads with SP alone."""

    def differs(model: Any, sp: int, *faults: Any) -> None:
        options = arguments(model) if isinstance(model, Family) else {}
        stock = start(model, 4, plugin=False, **options)
        expected = parity.run(stock, REQUESTS)
        stock.close()
        for fault in faults:

            def in_rank(rank: int, fault: Any = fault) -> None:
                options.get("in_rank", lambda _rank: None)(rank)
                fault(rank)

            host = start(model, 4, sp_size=sp, shift_mode="sp", **{**options, "in_rank": in_rank})
            assert not parity.equal(expected, parity.run(host, REQUESTS)), f"{model.name}: {fault.__name__}"
            host.close()

    differs(family, 2, swap_two_heads, *([forget_moe_tp_group] if family in WITH_EXPERTS else []))
    if family is not OLMO2:
        two = (
            family.with_kv_heads(2)
            if isinstance(family, Family)
            else replace(family, name=f"{family.name}-2kv", kv_heads=2)
        )
        differs(two, 4, replicate_the_wrong_kv_head)


@pytest.mark.parametrize("family", [QWEN2_5_VL, QWEN3_VL], ids=lambda f: f.name)
def test_vision_language_family(family, start):
    """Images: mrope positions, embeddings in the place of ids, deepstack."""
    engine = {"skip_tokenizer_init": False, "enable_multimodal": True}
    stock = start(family, 4, plugin=False, **engine)
    expected = stock.call(look_at_images)
    stock.close()
    (first, with_image, _), (second, without, _), _ = expected
    assert with_image > without + 2  # the image became several tokens
    assert first != second  # and they matter
    host = start(family, 4, sp_size=2, shift_mode="sp", **engine)
    assert_close(expected, host.call(look_at_images), family.name)
    assert host.info()["tokens"]["shift"] == 0
    host.set(mode="shift", threshold=20)
    host.flush_cache()
    assert_close(expected, host.call(look_at_images), family.name)
    assert host.info()["tokens"]["shift"] > 0


def test_the_families_differ_where_it_matters():
    """What each is here for is in its configuration: sinks, windows, shared experts, biases, positions."""
    assert GPT_OSS.options["layer_types"].count("sliding_attention") == 2
    assert GEMMA2.options["sliding_window"] == GEMMA3.options["sliding_window"] == 32 < max(map(len, REQUESTS.prompts))
    assert QWEN2_MOE.options["shared_expert_intermediate_size"]
    assert LLAMA4.options["attn_temperature_tuning"]
    assert "num_key_value_heads" not in COHERE.options
