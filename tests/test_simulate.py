"""The simulator: nothing gets lost, the KV budget holds, and simple cases have the times that follow from the costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.models import CONFIGS
from benchmarks.workloads import always_base, always_shift, at_once, constant_rate, frequent_switches
from sgl_shift.config import Settings
from sgl_shift.cost import Batch, Chunk
from sgl_shift.deployment import Deployment, DoesNotFitError, Scheduler
from sgl_shift.hardware import GPUS, Profile
from sgl_shift.layout import Layout
from sgl_shift.policy import Configuration
from sgl_shift.served import Result
from sgl_shift.shape import ModelShape
from sgl_shift.simulate import simulate
from sgl_shift.traces import Request

MODEL = ModelShape.from_config(CONFIGS["Llama-8B"])
H100 = Profile(GPUS["h100"])
BASE, SHIFT = Configuration.BASE, Configuration.SHIFT


def deployment(sp: int = 1, *, kv_tokens: int = 1_000_000, threshold: int = 256, mode="shift", **options) -> Deployment:
    scheduler = Scheduler(**options)
    made = Deployment.of("x", MODEL, H100, Layout(4, sp), 70e9, settings=Settings(threshold, mode), scheduler=scheduler)
    return replace(made, kv_tokens=kv_tokens)


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    def one() -> Request:
        prompt, block = draw(st.integers(1, 300)), 20
        start = draw(st.integers(0, 2)) * 1000
        blocks = tuple(range(start, start + -(-prompt // block))) if draw(st.booleans()) else ()
        return Request(draw(st.floats(0, 2)), prompt, draw(st.integers(1, 60)), blocks, block)

    return sorted(one() for _ in range(draw(st.integers(1, 25))))


@given(
    workloads(),
    st.sampled_from(["sglang", "vllm"]),
    st.booleans(),
    st.integers(400, 1500),
    st.sampled_from([16, 64, 512]),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([1, 2]),
    st.sampled_from(["round_robin", "least_loaded"]),
)
@settings(deadline=None, max_examples=60)
def test_every_request_is_served_within_the_kv_budget_and_tokens_add_up(
    requests, kind, prefix_cache, kv_tokens, step_tokens, concurrency, replicas, balance
):
    given_to = deployment(
        4,
        kv_tokens=kv_tokens,
        threshold=32,
        kind=kind,
        step_tokens=step_tokens,
        prefix_cache=prefix_cache,
        balance=balance,
    )
    result = simulate(replace(given_to, replicas=replicas), requests, concurrency=concurrency)
    assert Counter(s.request for s in result.served) == Counter(requests)
    assert all(0 <= s.kv_used <= kv_tokens for s in result.stretches)
    for served in result.served:
        assert served.arrival < served.first <= served.finish
        assert (served.first == served.finish) == (served.request.output_tokens == 1)
        assert 0 <= served.cached < served.request.prompt_tokens
    # The last token of an answer is never computed on.
    work = sum(s.request.prompt_tokens - s.cached + s.request.output_tokens - 1 for s in result.served)
    done = sum(s.tokens for s in result.stretches)
    if result.preemptions:
        assert done >= work
    else:
        assert done == work
    for number in range(replicas):  # a replica does one step after the other
        mine = [s for s in result.stretches if s.replica == number]
        assert all(a.start + a.seconds <= b.start + 1e-9 for a, b in pairwise(mine))


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_request_alone_takes_the_sum_of_its_steps(kind):
    result = simulate(deployment(kind=kind, step_tokens=1000), [Request(5.0, 2500, 4)])
    cost = deployment().shift
    chunks = [Chunk(1000, 0), Chunk(1000, 1000), Chunk(500, 2000)]
    served = result.served[0]
    first = H100.efficiency.request + sum(cost.seconds(Batch((chunk,))) for chunk in chunks)
    assert served.ttft == pytest.approx(first)
    decode = sum(cost.seconds(Batch((), 1, 2500 + i)) for i in range(3))
    assert served.finish - served.first == pytest.approx(decode)
    assert served.tpot == pytest.approx(decode / 3)


def test_sglang_prefills_first_and_vllm_mixes():
    requests = [Request(0.0, 100, 400), Request(0.3, 5000, 2)]

    def mixed(kind: str) -> Result:
        return simulate(deployment(kind=kind, step_tokens=1000), requests)

    sglang, vllm = mixed("sglang"), mixed("vllm")
    assert {s.tokens // s.steps for s in sglang.stretches} == {100, 1000, 1, 2}
    assert 1000 in {s.tokens // s.steps for s in vllm.stretches}
    assert sum(s.steps for s in vllm.stretches) < sum(s.steps for s in sglang.stretches)
    assert sglang.served[-1].request == vllm.served[-1].request == requests[0]


def test_shift_takes_each_step_by_its_tokens():
    result = simulate(deployment(4, threshold=256), at_once(3, 3000, 50))
    for stretch in result.stretches:
        assert stretch.configuration is (BASE if stretch.tokens // stretch.steps > 256 else SHIFT)
    assert simulate(deployment(4, mode="sp"), at_once(3, 3000, 50)).steps_in(SHIFT) == 0
    assert simulate(deployment(1), at_once(3, 3000, 50)).steps_in(BASE) == 0


def test_the_three_functional_patterns():
    """Section 3.3 of the paper notes: same speed as SP, as TP, and many switches without a stall."""
    base = always_base(0.1)
    shift, sp = (simulate(deployment(4, threshold=16, mode=mode), base) for mode in ("shift", "sp"))
    assert shift.steps_in(SHIFT) == 0
    assert shift.seconds == sp.seconds
    alone = always_shift(0.1)
    assert simulate(deployment(4, threshold=512), alone).seconds == simulate(deployment(1), alone).seconds
    result = simulate(deployment(4, threshold=128), frequent_switches(0.5))
    kinds = [s.configuration for s in sorted(result.stretches)]
    assert sum(a is not b for a, b in pairwise(kinds)) >= 90
    assert result.median(lambda s: s.completion) < 0.5


def test_a_shared_prefix_is_computed_once():
    shared = tuple(range(10))
    requests = [Request(float(i), 1000 + 50, 5, (*shared, 100 + i), 100) for i in range(4)]
    result = simulate(deployment(), requests)
    assert [s.cached for s in result.served] == [0, 1000, 1000, 1000]
    assert result.served[1].ttft < result.served[0].ttft
    assert all(s.cached == 0 for s in simulate(deployment(prefix_cache=False), requests).served)


def test_too_little_room_makes_requests_wait_or_be_computed_again():
    requests = at_once(20, 200, 100)
    plenty = simulate(deployment(kind="vllm"), requests)
    tight = simulate(deployment(kind="vllm", kv_tokens=1200), requests)
    assert plenty.preemptions == 0 < tight.preemptions
    assert tight.seconds > 2 * plenty.seconds
    assert sum(s.tokens for s in tight.stretches) > sum(s.tokens for s in plenty.stretches)


def test_what_can_never_fit_is_refused_and_counted():
    result = simulate(deployment(kv_tokens=1000), [Request(0.0, 900, 200), Request(0.0, 90, 20)])
    assert (result.refused, len(result.served)) == (1, 1)


def test_closed_loop_runs_so_many_at_a_time():
    result = simulate(deployment(), at_once(30, 100, 20), concurrency=4)
    arrivals = sorted((s.arrival, s.finish) for s in result.served)
    for at, _ in arrivals:
        assert sum(start <= at < end for start, end in arrivals) <= 4
    assert max(s.tokens // s.steps for s in result.stretches if s.configuration is SHIFT) <= 400


def test_more_replicas_serve_more():
    requests = constant_rate(20, 20, 2000, 100)
    one, four = (simulate(replace(deployment(), replicas=n), requests) for n in (1, 4))
    assert four.median(lambda s: s.ttft) < one.median(lambda s: s.ttft)
    assert {s.replica for s in four.stretches} == {0, 1, 2, 3}


def test_peak_throughput_is_that_of_the_busiest_window():
    result = simulate(deployment(), [Request(0.0, 8000, 2), Request(50.0, 10, 2)])
    assert result.peak_throughput(10) == pytest.approx(8001 / 10)
    assert result.quantile(lambda s: s.ttft, 0.99) >= result.quantile(lambda s: s.ttft, 0.01)


def test_weights_that_do_not_fit_are_refused():
    model = ModelShape.from_config(CONFIGS["Llama-70B"])
    with pytest.raises(DoesNotFitError, match=r"weights take 141.1 GB a GPU, 70.0 GB are there"):
        Deployment.of("x", model, H100, Layout(1, 1), 70e9)
