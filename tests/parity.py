"""Running the same requests on stock SGLang and on Shift Parallelism, and comparing every number that comes back."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from tests.checkpoints import VOCAB
from tests.hosting import Host

# Float32 base and shift agree to about 1e-4; the margin is for the order of sums in larger models.
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Requests:
    """A batch of requests: token ids, and how many tokens each is to generate."""

    prompts: list[list[int]]
    max_new_tokens: list[int]

    @classmethod
    def random(cls, seed: int, lengths: list[int], max_new_tokens: list[int]) -> Requests:
        rng = random.Random(seed)
        prompts = [[rng.randrange(1, VOCAB) for _ in range(n)] for n in lengths]
        return cls(prompts, max_new_tokens)


def run(host: Host, requests: Requests, logprob_start_len: int = 0) -> list[dict[str, Any]]:
    """Generate greedily; each answer as token ids, logprobs of prompt and output, margins and cached tokens."""
    answers = host.generate(
        input_ids=requests.prompts,
        sampling_params=[{"temperature": 0, "max_new_tokens": n} for n in requests.max_new_tokens],
        return_logprob=True,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=2,
    )
    return [simplify(answer) for answer in answers]


def simplify(answer: dict[str, Any]) -> dict[str, Any]:
    meta = answer["meta_info"]
    tops = meta.get("output_top_logprobs", ())  # these three are absent where no logprobs were asked for
    return {
        "tokens": answer["output_ids"],
        "prompt_logprobs": [p for p, *_ in meta.get("input_token_logprobs", ()) if p is not None],
        "logprobs": [p for p, *_ in meta.get("output_token_logprobs", ())],
        "margins": [top[0][0] - top[1][0] for top in tops],
        "cached": meta["cached_tokens"],
        "finish": meta["finish_reason"]["type"],
        "retractions": meta.get("num_retractions", 0),
    }


def cut(answer: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The first ``tokens`` tokens of an answer that may have ended early."""
    parts = {part: answer[part][:tokens] for part in ("tokens", "logprobs", "margins")}
    return {**answer, **parts, "finish": "cut"}


def worst_difference(stock: list[dict[str, Any]], ours: list[dict[str, Any]], *, cached: bool = False) -> float:
    """The largest difference of a logprob. Raises AssertionError where tokens differ that must not.

    Tokens are compared up to a position where stock's two best are closer than the tolerance: there either is right,
    and what follows is another text.
    """
    worst = 0.0
    assert len(stock) == len(ours)
    for index, (theirs, mine) in enumerate(zip(stock, ours, strict=True)):
        where = f"request {index}"
        assert len(theirs["prompt_logprobs"]) == len(mine["prompt_logprobs"]), where
        pairs = list(zip(theirs["prompt_logprobs"], mine["prompt_logprobs"], strict=True))
        assert theirs["finish"] == mine["finish"], where
        if cached:
            assert theirs["cached"] == mine["cached"], where
        for at, (a, b) in enumerate(zip(theirs["tokens"], mine["tokens"], strict=True)):
            if a != b:
                assert theirs["margins"][at] < TOLERANCE, f"{where}: token {at} is {b}, stock has {a}"
                break
            pairs.append((theirs["logprobs"][at], mine["logprobs"][at]))
        differences = [abs(a - b) for a, b in pairs]
        assert not any(map(math.isnan, differences)), f"{where}: not a number"  # which max() would let pass
        worst = max([worst, *differences])
    return worst


def assert_equal(stock: list[dict[str, Any]], ours: list[dict[str, Any]], *, cached: bool = False) -> float:
    worst = worst_difference(stock, ours, cached=cached)
    assert worst < TOLERANCE, f"logprobs differ by {worst}"
    return worst


def equal(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> bool:
    """Whether :func:`assert_equal` would pass; for negative controls."""
    try:
        assert_equal(stock, ours)
    except AssertionError:
        return False
    return True


def assert_close(a: Any, b: Any, where: str) -> None:
    """Equal, with numbers that are not whole within the tolerance."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_close(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_close(x, y, f"{where}[{index}]")
    elif isinstance(a, float) and isinstance(b, float):
        assert abs(a - b) < TOLERANCE * max(1.0, abs(a)), f"{where}: {a} {b}"
    else:
        assert a == b, f"{where}: {a} {b}"
