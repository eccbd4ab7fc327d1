"""The cost model stays as near to the published figures as docs/results.md says."""

from __future__ import annotations

import math

import pytest

from benchmarks import validate
from sgl_shift.hardware import Efficiency


def test_the_median_error_of_figures_that_nothing_was_fitted_to():
    rows = [*validate.radar(Efficiency()), *validate.ulysses(Efficiency())]
    assert len(rows) == 36
    assert validate.median_error(rows) <= 0.15


def test_the_table_that_the_parameters_are_fitted_to():
    rows = list(validate.FITTED_TO(Efficiency()))
    assert len(rows) == 10
    assert max(abs(row.error) for row in rows) <= 0.10


def test_rows_of_the_issue_with_a_threshold_on_both_sides_of_the_batch():
    """79 decode at once: a threshold of 64 sends every decode to SP, 128 none (paper notes, 2.9)."""
    model = validate.ModelShape.from_config(validate.CONFIGS["Llama-70B FP8"])
    requests = validate.repeated_prompts(158, 100, 200, 200)

    def seconds(threshold: int) -> float:
        profile = validate.Profile(validate.GPUS["h200"])
        found = validate.deployments(model, profile, 4, threshold=threshold, step_tokens=(16384, 16384))
        return validate.simulate(found["Shift"], requests, concurrency=79).mean(lambda s: s.completion)

    assert seconds(64) / seconds(128) == pytest.approx(7.45 / 3.93, rel=0.15)
    assert seconds(128) == pytest.approx(seconds(512), rel=0.02)


def test_summary_counts_what_is_held_out():
    row = validate.Row("t", "w", "ms", 100, 110)
    text = validate.summary({"fitted to": [row], "held out": [row, row._replace(predicted=60)], "apart": []})
    assert "| **all held out** | | 2 | 25.0% | 1 | -40% (w) |" in text
    assert math.isclose(row.error, 0.1)


@pytest.mark.long
def test_all_that_is_held_out():
    if not validate.TRACES.exists():
        pytest.skip(f"no traces in {validate.TRACES}; docs/results.md says where they are from")
    rows = [row for table in validate.HELD_OUT for row in table(Efficiency())]
    assert len(rows) == 94
    assert validate.median_error(rows) <= 0.15


@pytest.mark.long
def test_the_parameters_are_the_best_for_the_table_they_are_fitted_to():
    def loss(efficiency: Efficiency) -> float:
        return sum(math.log(1 + row.error) ** 2 for row in validate.FITTED_TO(efficiency))

    assert loss(Efficiency()) <= 1.1 * loss(validate.fit(Efficiency()))
