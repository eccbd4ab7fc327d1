"""Random mixes of requests, thresholds, joins and aborts, against stock."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import parity
from tests.checkpoints import DENSE, MOE, VOCAB
from tests.hosting import Host
from tests.traffic import Arrival, play

_RNG = random.Random(17)
PREFIXES = [[_RNG.randrange(1, VOCAB) for _ in range(400)] for _ in range(3)]


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Up to 7 requests of 1 to 600 tokens; many share a prefix, some join late, some are aborted."""
    result = []
    for index in range(draw(st.integers(1, 7))):
        length = draw(st.one_of(st.integers(1, 8), st.integers(1, 600)))
        shared = draw(st.integers(0, min(length, 400)))
        tail = random.Random(draw(st.integers(0, 10**6)))
        prompt = draw(st.sampled_from(PREFIXES))[:shared] + [tail.randrange(1, VOCAB) for _ in range(length - shared)]
        new_tokens = draw(st.integers(1, 16))
        abort_at = draw(st.none() | st.integers(1, new_tokens)) if new_tokens > 4 else None
        result.append(Arrival(prompt, new_tokens, after=draw(st.integers(0, index)), abort_at=abort_at))
    return result


@pytest.fixture(scope="module", params=[(DENSE, 2, 2), (MOE, 4, 2)], ids=lambda p: p[0].name)
def both(request, checkpoint, tmp_path_factory):
    model, world, sp = request.param
    folder = tmp_path_factory.mktemp("traffic")
    # Idle ranks sleep: two engines share this machine's cores.
    common = {"sleep_on_idle": True, "chunked_prefill_size": 256}
    with (
        Host(checkpoint(model), world, plugin=False, log=folder / "stock.log", **common) as stock,
        Host(checkpoint(model), world, sp_size=sp, log=folder / "shift.log", **common) as shift,
    ):
        yield stock, shift


def test_random_traffic_is_answered_as_by_stock(both):
    stock, shift = both
    ran = {"base": 0, "shift": 0, "aborted": 0}

    @settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(script=arrivals(), threshold=st.one_of(st.integers(1, 8), st.integers(1, 600)))
    def compare(script: list[Arrival], threshold: int) -> None:
        stock.flush_cache()
        shift.flush_cache()
        shift.set(threshold=threshold)
        before = shift.info()["batches"]
        theirs, ours = stock.call(play, script), shift.call(play, script)
        for arrival, a, b in zip(script, theirs, ours, strict=True):
            if arrival.abort_at is None:
                parity.assert_equal([a], [b])
            else:  # an abort may come a token sooner or later
                common = min(len(a["tokens"]), len(b["tokens"]))
                parity.assert_equal([parity.cut(a, common)], [parity.cut(b, common)])
                ran["aborted"] += 1
        for name, count in shift.info()["batches"].items():
            ran[name] += count - before[name]

    compare()
    print(ran)
    assert all(ran.values())
