"""Trace loaders on tiny files in the public formats, and the synthetic workloads."""

from __future__ import annotations

import json

import pytest

from benchmarks.workloads import (
    PATTERNS,
    always_base,
    always_shift,
    bursty,
    constant_rate,
    frequent_switches,
    shared_tokens,
)
from sgl_shift.traces import Request, Scale, TraceError, azure_code, load, mooncake, prompt_ids

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799600,110,27
"""
MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1536, "output_length": 490, "hash_ids": [0, 1, 3]},
    {"timestamp": 6000, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]},
    {"timestamp": 9000, "input_length": 600, "output_length": 7, "hash_ids": [5, 6]},
]


@pytest.fixture
def azure(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    return path


@pytest.fixture
def conversation(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, MOONCAKE)))
    return path


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_azure(azure):
    requests = load(azure)
    assert [(r.prompt_tokens, r.output_tokens) for r in requests] == [(4808, 10), (3180, 8), (110, 27)]
    assert [r.arrival for r in requests] == pytest.approx([0, 0.052, 60], abs=1e-6)
    assert shared_tokens(requests) == 0
    assert len(azure_code(azure, Scale(seconds=1))) == 2


def test_mooncake_prompts_share_what_their_hash_ids_say(conversation):
    requests = mooncake(conversation)
    prompts = [prompt_ids(r, i, 32_000, seed=7, reserved=100) for i, r in enumerate(requests)]
    assert [len(p) for p in prompts] == [1100, 1536, 600, 600]
    assert common(prompts[0], prompts[1]) == 1024  # two whole blocks, and not a token more
    assert common(prompts[1], prompts[2]) == 512
    assert common(prompts[2], prompts[3]) == 0
    assert all(100 <= token < 32_000 for prompt in prompts for token in prompt)
    assert shared_tokens(requests) == 1024 + 512
    assert prompts == [prompt_ids(r, i, 32_000, seed=7, reserved=100) for i, r in enumerate(requests)]
    assert prompts[0] != prompt_ids(requests[0], 0, 32_000, seed=8, reserved=100)


def test_what_is_shared_stays_shared_when_lengths_shrink(conversation):
    requests = load(conversation, Scale(tokens=1 / 64, time=0.5))
    assert [(r.prompt_tokens, r.output_tokens, r.arrival) for r in requests] == [
        (17, 8, 0.0),
        (24, 8, 1.5),
        (9, 1, 3.0),
        (9, 1, 4.5),
    ]
    prompts = [prompt_ids(r, i, 1000) for i, r in enumerate(requests)]
    assert common(prompts[0], prompts[1]) == 16
    assert common(prompts[0], prompts[2]) == 8


def test_a_window_starts_at_zero_and_lengths_can_be_bounded(conversation):
    requests = load(conversation, Scale(start=3, seconds=4, longest=1000))
    assert [r.arrival for r in requests] == [0, 3]
    assert all(r.prompt_tokens + r.output_tokens <= 1000 for r in requests)
    assert requests[0].blocks == (0,)  # of 1,000 - 490 tokens
    assert load(conversation, Scale(requests=1))[0].arrival == 0


def test_prompts_without_blocks_share_nothing():
    request = Request(0.0, 700, 1)
    assert common(prompt_ids(request, 0, 50_000), prompt_ids(request, 1, 50_000)) < 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "time,tokens\n1,2\n", "expected a CSV with TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("a.jsonl", '{"input_length": 3}\n', "expected JSON lines"),
        (
            "b.jsonl",
            '{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [1, 2]}\n',
            "2 hash_ids for 3 tokens in blocks of 512",
        ),
        ("a.txt", "", "a trace is a .csv"),
    ],
)
def test_other_formats_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(TraceError, match=message):
        load(tmp_path / name)


def test_synthetic_streams_have_the_rates_that_were_asked_for():
    even = constant_rate(4, 10, 100, 10)
    assert [r.arrival for r in even[:3]] == [0, 0.25, 0.5]
    assert len(even) == 40
    poisson = constant_rate(50, 100, 100, 10, poisson=True, seed=1)
    assert 4700 < len(poisson) < 5300
    assert (
        poisson
        == constant_rate(50, 100, 100, 10, poisson=True, seed=1)
        != constant_rate(50, 100, 100, 10, poisson=True)
    )


def test_bursts_come_on_top_of_a_steady_stream():
    requests = bursty(seconds=120, rate=2, burst_size=100, burst_every=60, burst_seconds=5, spread=0.2, seed=3)
    assert requests == sorted(requests)
    assert requests == bursty(seconds=120, rate=2, burst_size=100, burst_every=60, burst_seconds=5, spread=0.2, seed=3)
    inside = [r for r in requests if 30 <= r.arrival < 35 or 90 <= r.arrival < 95]
    assert 200 <= len(inside) <= 200 + 2 * 10 * 2
    assert 150 < len(requests) - len(inside) < 320
    assert all(4096 * 0.8 - 1 <= r.prompt_tokens <= 4096 * 1.2 + 1 for r in requests)
    assert len(bursty(seconds=120, rate=0, burst_size=10, burst_every=60)) == 20


def test_patterns_are_those_of_the_paper_notes():
    assert len(always_base()) == 1024
    assert (always_base()[0].prompt_tokens, always_base()[0].output_tokens) == (8192, 128)
    assert always_shift() == [Request(0.0, 256, 8192)]
    switches = frequent_switches()
    assert len(switches) == 10_000
    assert {r.arrival for r in switches} == {i * 0.5 for i in range(100)}
    for pattern in PATTERNS.values():
        assert len(pattern(0.1)) <= len(pattern())
