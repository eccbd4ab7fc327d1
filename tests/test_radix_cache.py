"""The prefix cache across switches, and everything that SGLang's scheduler does to requests, against stock."""

from __future__ import annotations

import random

import pytest

from tests import parity
from tests.checkpoints import DENSE, MOE, VOCAB
from tests.parity import Requests
from tests.test_parity import TOGETHER, WAYS
from tests.traffic import Arrival, play

BASE, SHIFT = {"mode": "sp"}, {"mode": "tp"}


def conversation() -> list[tuple[dict[str, str], list[int], int]]:
    """(configuration, prompt, new tokens): prompts that share prefixes written in the other configuration."""
    rng = random.Random(7)

    def text(n: int) -> list[int]:
        return [rng.randrange(1, VOCAB) for _ in range(n)]

    a, b = text(100), text(61)
    return [
        (BASE, a, 4),  # written in base
        (SHIFT, a + text(9), 4),  # read in shift
        (BASE, a + text(40), 4),  # read in base, what base and shift wrote
        (SHIFT, b, 12),  # written in shift, its decode too
        (BASE, b + text(30), 4),  # read in base
        (SHIFT, b[:50] + text(70), 4),  # a branch in the middle
        (BASE, b[:50] + text(3), 4),
        (BASE, a, 4),  # all but the last token is there
        (SHIFT, a, 4),
        (BASE, b, 3),
    ]


def serve(host, script, switch: bool):
    answers = []
    for settings, prompt, new_tokens in script:
        if switch:
            host.set(**settings)
        answers += parity.run(host, Requests([prompt], [new_tokens]), logprob_start_len=-1)
    return answers


def test_a_prefix_written_in_one_configuration_is_reused_in_the_other(start):
    script = conversation()
    stock = serve(start(DENSE, 2, plugin=False), script, switch=False)
    host = start(DENSE, 2, sp_size=2)
    ours = serve(host, script, switch=True)
    parity.assert_equal(stock, ours, cached=True)
    assert [a["cached"] for a in ours] == [a["cached"] for a in stock]
    assert sum(a["cached"] > 0 for a in ours) >= 7
    assert host.info()["switches"] >= 8
    print("cached tokens:", [a["cached"] for a in ours])


@pytest.mark.parametrize(
    "arguments",
    [
        {"chunked_prefill_size": 32},
        {"chunked_prefill_size": 32, "enable_mixed_chunk": True},
        {"disable_overlap_schedule": True},
        {"page_size": 16},
        {"disable_radix_cache": True},
        {"schedule_policy": "lpm", "num_continuous_decode_steps": 2},
    ],
    ids=lambda a: ",".join(a),
)
def test_every_way_of_scheduling_equals_stock(arguments, start):
    script = conversation()
    theirs = start(DENSE, 2, plugin=False, **arguments)
    stock = serve(theirs, script, switch=False), parity.run(theirs, TOGETHER)
    theirs.close()
    host = start(DENSE, 2, sp_size=2, **arguments)
    parity.assert_equal(stock[0], serve(host, script, switch=True), cached=True)
    for settings, *_ in WAYS.values():
        host.set(**settings)
        parity.assert_equal(stock[1], parity.run(host, TOGETHER))


def test_requests_retracted_for_want_of_kv_space_come_out_as_in_stock(start):
    """Ten requests that together need four times the pool: decode retracts some, which are then computed again."""
    crowd = Requests.random(11, [20] * 10, [70] * 10)
    arguments = {"max_total_tokens": 256, "schedule_conservativeness": 0.1}
    theirs = start(DENSE, 2, plugin=False, **arguments)
    stock = parity.run(theirs, crowd)
    theirs.close()
    assert sum(a["retractions"] for a in stock) > 0
    host = start(DENSE, 2, sp_size=2, shift_threshold=4, **arguments)
    ours = parity.run(host, crowd)
    assert sum(a["retractions"] for a in ours) > 0
    parity.assert_equal(stock, ours)
    tokens = host.info()["tokens"]
    assert tokens["base"] > 0
    assert tokens["shift"] > 0


@pytest.mark.parametrize("model", [DENSE, MOE], ids=lambda m: m.name)
def test_requests_aborted_in_the_middle_leave_the_others_alone(model, start):
    rng = random.Random(5)
    arrivals = [
        Arrival([rng.randrange(1, VOCAB) for _ in range(n)], 60, after=i // 2, abort_at=3 if i % 3 == 0 else None)
        for i, n in enumerate([40, 7, 90, 12, 55, 3, 61])
    ]
    theirs = start(model, 2, plugin=False)
    stock = theirs.call(play, arrivals)
    theirs.close()
    host = start(model, 2, sp_size=2, shift_threshold=4)
    ours = host.call(play, arrivals)
    for arrival, a, b in zip(arrivals, stock, ours, strict=True):
        assert b["finish"] == ("abort" if arrival.abort_at else "length")
        if not arrival.abort_at:
            parity.assert_equal([a], [b])
    # and the engine is whole: every slot is free again, the next answers are right
    host.flush_cache()
    parity.assert_equal(parity.run(host, TOGETHER), parity.run(host, TOGETHER))
