"""``--shift-threshold auto``: the rule on ladders made up by hand, and what real ranks measure and agree on."""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any

import pytest
import torch

from sgl_shift.config import DEFAULT_THRESHOLD, ConfigError, Settings, resolve
from sgl_shift.ladder import BUDGET, Rung, Step, best_threshold, climb, sizes_from, threshold_of
from sgl_shift.policy import Configuration, choose
from tests import parity
from tests.checkpoints import DENSE, VOCAB
from tests.hosting import import_sglang
from tests.probes import Probe
from tests.traffic import Arrival, play, play_in_loop

BASE, SHIFT = Configuration


def ladder(*ratios: float | list[float]) -> list[Rung]:
    """Rungs of 2, 4, 8, ... tokens; of each the time in base over that in shift, of every pair or of all."""
    rungs = []
    for index, ratio in enumerate(ratios):
        pairs = ratio if isinstance(ratio, list) else [ratio] * 5
        rungs.append(Rung(2 << index, [r * 0.01 for r in pairs], [0.01] * len(pairs)))
    return rungs


@pytest.mark.parametrize(
    ("ratios", "threshold"),
    [
        ((1.5, 1.2, 0.8, 0.6), 4),  # the ordinary one
        ((0.8, 0.7, 0.6), 1),  # base is faster everywhere
        ((1.5, 1.2, 1.1), 8),  # TP is
        ((1.5, 0.99, 0.985, 0.8), 8),  # within noise TP wins
        ((0.99, 1.0, 1.01), 8),
        ((1.3, 0.95, 1.3, 0.5), 8),  # not monotone: what loses least
        ((1.1, 0.5, 1.1, 0.5), 2),
        ((1.5, [0.9, 0.9, 0.9, 1.4, 1.4], 0.6), 4),  # faster in the median, but not reliably
        ((1.5, [0.9, 0.9, 0.9, 0.9, 1.4], 0.6), 2),  # one pair of five was disturbed
    ],
)
def test_the_threshold_loses_least_and_tp_wins_within_noise(ratios, threshold):
    assert best_threshold(ladder(*ratios)) == threshold


def test_nothing_is_concluded_of_what_was_not_measured():
    assert threshold_of(ladder(1.5, 1.2, 1.1), 8) == 8
    assert threshold_of(ladder(1.5, 1.2, 1.1), 100) == 100
    assert threshold_of(ladder(1.5, 1.2, 1.1), 10_000) == DEFAULT_THRESHOLD
    assert threshold_of(ladder(1.5, 1.2, 0.7), 10_000) == 4


def test_sizes_are_powers_of_four_that_are_admissible():
    assert sizes_from(4, range(1, 101)) == [4, 16, 64, 100]
    assert sizes_from(4, [1, 2, 4, 8, 12, 20, 24, 40]) == [4, 20, 40]
    assert sizes_from(8, range(1, 5)) == [4]  # fewer requests than the SP degree
    assert sizes_from(8, range(1, 1)) == []


class Machine:
    """Base has overhead, and is twice as fast a token; a step in twelve takes three times as long."""

    def __init__(self, second: float = 1e-3, overhead: float = 40) -> None:
        self.second, self.overhead, self.random = second, overhead, random.Random(3)
        self.ran: list[tuple[int, Configuration]] = []
        self.spent = 0.0

    def __call__(self, tokens: int, configuration: Configuration) -> Step:
        self.ran.append((tokens, configuration))
        seconds = self.second * (self.overhead + tokens if configuration is BASE else 2 * tokens)
        seconds *= 3 if self.random.random() < 1 / 12 else 1
        self.spent += seconds
        return Step(seconds, seconds)


def test_a_climb_finds_the_crossing_of_a_noisy_machine_within_its_budget():
    machine = Machine(1e-5)
    rungs = climb(2, range(1, 5000), machine)
    tokens = [rung.tokens for rung in rungs]
    assert {*tokens} > {2, 8, 32, 128, 512, 2048, 4999}  # and some more, beside the crossing
    assert tokens == sorted(tokens)
    assert 24 <= best_threshold(rungs) <= 56  # they cross at 40
    assert all(len(rung.base) == len(rung.shift) >= 3 for rung in rungs)


def test_a_slow_machine_is_measured_as_far_as_the_budget_goes():
    machine = Machine(5e-4)
    rungs = climb(2, range(1, 100_000), machine)
    assert rungs[-1].tokens > 40
    assert 24 <= best_threshold(rungs) <= 56
    assert machine.spent < 3 * BUDGET  # pairs that were disturbed and warming up included


@pytest.mark.parametrize("given", [{"shift_threshold": "auto"}, {}])
def test_auto_is_a_threshold_in_flags_keywords_and_environment(given):
    shift = resolve({"sp_size": 2, **given}, {} if given else {"SGL_SHIFT_THRESHOLD": "auto"})
    assert shift.auto
    assert shift.settings == Settings(DEFAULT_THRESHOLD)
    assert type(shift).from_dict(shift.to_dict()) == shift
    assert not resolve({"shift_threshold": 5}, {"SGL_SHIFT_THRESHOLD": "auto"}).auto
    with pytest.raises(ConfigError, match=r"'automatic' is not a whole number.*auto measures it"):
        resolve({"shift_threshold": "automatic"}, {})


def test_auto_on_the_command_line_and_in_a_request():
    import_sglang()
    from sgl_shift_patches import cli, control

    parser = argparse.ArgumentParser()
    cli.add_cli_args(None, parser)
    assert parser.parse_args(["--shift-threshold", "auto"]).shift_threshold == "auto"
    assert parser.parse_args(["--shift-threshold", "9"]).shift_threshold == 9
    asked = control.encode({"shift_threshold": "auto", "shift_mode": "sp"})
    assert asked == {"shift_measure": 1, "shift_mode": 1}


def test_two_thresholds_and_a_number_that_sets_both():
    settings = Settings(10, prefill_threshold=100)
    for kind, tokens, expected in (("decode", 11, BASE), ("prefill", 11, SHIFT), ("prefill", 101, BASE)):
        assert choose(settings, tokens, base_can_run=True, kind=kind) is expected
    assert settings.updated(mode="sp").limit("prefill") == 100
    assert settings.updated(threshold=50) == Settings(50)
    assert Settings(50).limit("prefill") == 50


def look(scheduler: Any) -> Any:
    from sgl_shift_patches import autotune, state

    shift, eager = state.current(), scheduler.tp_worker.model_runner.eager_runner
    seen = shift.settings, shift.measured, shift.report()
    with shift.stats.paused(), torch.no_grad(), eager.model_context():
        steps = autotune.Steps(shift, eager, "decode", 16, replayed=16)  # there are no graphs here
        timed = [steps(4, configuration) for configuration in (*Configuration, None)]
        before = dict(shift.stats.batches)
        steps(4, BASE)
        ran = {str(c): n - before[c] for c, n in shift.stats.batches.items()}
    return *seen, (timed, steps.replayed, ran)


def check(ranks: list[Any]) -> Settings:
    """What every rank holds is the same, and follows from the ladder by the rule."""
    settings, measured, report, (timed, replayed, ran) = ranks[0]
    assert all(rank[:2] == (settings, measured) for rank in ranks)
    assert all(rank[3] == (timed, 0, {"base": 1, "shift": 0}) for rank in ranks), ran
    assert all(0 < step.seconds < step.cost for step in timed)
    assert replayed == 0
    assert measured.keys() == {"decode", "prefill"}
    assert (settings.threshold, settings.prefill_threshold) == tuple(m.threshold for m in measured.values())
    most = {"decode": 16, "prefill": 256}
    for kind, found in measured.items():
        assert found.threshold == threshold_of(found.rungs, most[kind])
        assert found.rungs[0].tokens == 2
        assert 1 <= found.threshold <= most[kind]
        assert found.rungs[-1].tokens <= most[kind]
        for rung in found.rungs:
            assert len(rung.base) == len(rung.shift) >= 3
            assert min(rung.base + rung.shift) > 0
        shown = report["measured"][kind]
        assert shown["threshold"] == found.threshold
        assert [entry["tokens"] for entry in shown["ladder"]] == [rung.tokens for rung in found.rungs]
    assert report["threshold"] == settings.threshold
    assert report["prefill_threshold"] == settings.prefill_threshold
    return settings


def arrivals(count: int) -> list[Arrival]:
    rng = random.Random(5)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(rng.choice([2, 5, 40, 300]))] for _ in range(count)]
    return [Arrival(prompt, rng.randrange(4, 24), after=index // 2) for index, prompt in enumerate(prompts)]


def play_while_setting(engine: Any, script: list[Arrival], changes: list[dict[str, Any]]) -> tuple[Any, int]:
    """Answers, and how many of the changes were made before the last of them."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    from sgl_shift_patches import control

    async def both() -> tuple[Any, int]:
        playing = asyncio.create_task(play_in_loop(engine, script))
        during = 0
        for change in changes:
            request = SetInternalStateReq(server_args=control.encode(change))
            assert all(await engine.tokenizer_manager.set_internal_state(request)), change
            during += not playing.done()
        return await playing, during

    return engine.loop.run_until_complete(both())


COMMON = {"sleep_on_idle": True, "chunked_prefill_size": 256}


def test_ranks_measure_agree_and_answer_as_before(start, tmp_path):
    script = arrivals(8)
    stock = start(DENSE, 2, plugin=False, **COMMON)
    expected = stock.call(play, script)
    stock.close()
    environment = {"SGL_SHIFT_DEBUG": "1"}  # ranks compare every step
    host = start(
        DENSE,
        2,
        sp_size=2,
        shift_threshold="auto",
        in_rank=Probe(tmp_path, look).install,
        environment=environment,
        **COMMON,
    )
    check([rank["extra"] for rank in host.probe(tmp_path)])
    assert host.info()["batches"] == {"base": 0, "shift": 0}  # what was timed is not the user's
    assert "Shift Parallelism: prefill steps of tokens: milliseconds in base/shift: 2: " in host.log.read_text()
    host.set(threshold=7)
    settings, measured, report, _ = host.probe(tmp_path)[1]["extra"]
    assert (settings, measured, report["measured"]) == (Settings(7), {}, {})

    changes = [{"shift_threshold": n} for n in (1, 300, 3, 40)]
    auto = {"shift_threshold": "auto"}
    answers, during = host.call(play_while_setting, script, [*changes, auto, *changes, auto])
    parity.assert_equal(expected, answers)
    assert during > len(changes)  # measured while requests were running
    check([rank["extra"] for rank in host.probe(tmp_path)])
    host.set(threshold="auto", mode="sp")
    assert check([rank["extra"] for rank in host.probe(tmp_path)]).mode == "sp"


@pytest.mark.long
def test_a_thousand_changes_under_load(start):
    script = arrivals(60)
    stock = start(DENSE, 2, plugin=False, **COMMON)
    expected = stock.call(play, script)
    stock.close()
    host = start(DENSE, 2, sp_size=2, environment={"SGL_SHIFT_DEBUG": "1"}, **COMMON)
    rng = random.Random(9)
    changes: list[dict[str, Any]] = [{"shift_threshold": rng.choice([1, 2, 8, 64, 255])} for _ in range(1000)]
    for index in (50, 400):
        changes[index] = {"shift_threshold": "auto"}
    during = 0
    while during < 1000:
        host.flush_cache()
        answers, now = host.call(play_while_setting, script, changes[during : during + 100])
        during += now
        parity.assert_equal(expected, answers)
    assert min(host.info()["batches"].values()) > 100
