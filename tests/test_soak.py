"""The soak would notice: differences, ties that are none, growth. And a minute of it."""

from __future__ import annotations

import json

import pytest

from benchmarks import soak
from tests.servers import PYTHON, run
from tests.traffic import Arrival

ANSWER = {
    "tokens": [5, 6, 7],
    "prompt_logprobs": [],
    "logprobs": [-1.0, -2.0, -3.0],
    "margins": [0.5, 1e-5, 0.5],
    "finish": "length",
}


@pytest.mark.parametrize("start", [0, None], ids=["logprobs", "none"])
def test_a_difference_is_told_from_a_tie(start):
    arrival = Arrival([1], 3, logprob_start_len=start)

    def ours(**other):
        answer = {**ANSWER, **other}
        if start is None:
            answer.update(logprobs=[], margins=[])
        return answer

    assert soak.compare(arrival, ANSWER, ours()) == (0, False)
    assert soak.compare(arrival, ANSWER, ours(tokens=[5, 9, 9])) == (0, True)
    for wrong in ({"tokens": [9, 6, 7]}, {"tokens": [5, 6, 9]}, {"finish": "abort"}, {"tokens": [5, 6]}):
        with pytest.raises((AssertionError, ValueError)):
            soak.compare(arrival, ANSWER, ours(**wrong))


def test_an_answer_that_was_aborted_is_compared_as_far_as_both_came():
    arrival = Arrival([1], 3, abort_at=2)
    shorter = {**ANSWER, "tokens": [5], "logprobs": [-1.0], "margins": [0.5], "finish": "abort"}
    assert soak.compare(arrival, ANSWER, shorter) == (0, False)
    with pytest.raises(AssertionError):
        soak.compare(arrival, ANSWER, {**shorter, "tokens": [4]})


def test_growth_is_seen_after_the_warm_up():
    def samples(**grows):
        flat = dict.fromkeys(soak.COUNT_GROWTH, 10) | {"rss_sum": 1000, "rss": {"main#0": 1000}}
        # The first tenth does not count.
        return [
            {**flat, **{name: 0 if at < 4 else flat[name] + step * at for name, step in grows.items()}}
            for at in range(40)
        ]

    assert not soak.growth(soak.quarters(samples()))
    for name in ("rss_sum", *soak.COUNT_GROWTH):
        (grown,) = soak.growth(soak.quarters(samples(**{name: 5})))
        assert grown.startswith(name)


@pytest.mark.long
def test_a_minute(tmp_path):
    result = run(
        [PYTHON, "-m", "benchmarks.soak", "--minutes", "1", "--sample-seconds", "3", "--results", str(tmp_path)]
    )
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert not found["failures"], found["failures"]
    assert result.returncode == 0, found["grown"]
    assert found["shift_parallel"]["switches"] > 50
