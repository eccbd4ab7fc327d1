"""Requests, and the public traces they come from. No torch, no SGLang: planner, simulator and benchmarks read the same.

Azure LLM inference 2023, code   github.com/Azure/AzurePublicDataset: AzureLLMInferenceTrace_code.csv
Mooncake conversation            github.com/kvcache-ai/Mooncake: FAST25-release/traces/conversation_trace.jsonl
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

MOONCAKE_BLOCK = 512  # tokens that one of its hash_ids stands for


class TraceError(ValueError):
    """A trace that cannot be read; the message says what was expected."""


class Request(NamedTuple):
    """One request of a workload.

    Attributes:
        arrival: seconds after the start.
        prompt_tokens, output_tokens: lengths; the output is generated in full (``ignore_eos``).
        blocks: an id for each ``block`` tokens of the prompt, the last one possibly partial. Equal ids, equal tokens:
            requests with the same leading ids share that prefix. Empty: nothing of the prompt is shared.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block: int = MOONCAKE_BLOCK


@dataclass(frozen=True)
class Scale:
    """How a recorded trace is cut and shrunk.

    Attributes:
        time: factor on arrival times; 2 is half the rate.
        tokens: factor on lengths. Blocks shrink with them, so that what was shared stays shared.
        start, seconds: the window of recorded time.
        requests: at most so many.
        longest: prompt and output together take at most so many tokens, after scaling.
    """

    time: float = 1.0
    tokens: float = 1.0
    start: float = 0.0
    seconds: float = float("inf")
    requests: int | None = None
    longest: int | None = None

    def apply(self, requests: Iterable[Request]) -> list[Request]:
        """In order of arrival, the first at 0."""
        inside = (r for r in requests if self.start <= r.arrival < self.start + self.seconds)
        kept = sorted(inside, key=lambda r: r.arrival)[: self.requests]
        return [self._scaled(request, kept[0].arrival) for request in kept]

    def _scaled(self, request: Request, first: float) -> Request:
        block = max(1, round(request.block * self.tokens))
        whole, rest = divmod(request.prompt_tokens, request.block)
        prompt = whole * block + (max(1, round(rest * block / request.block)) if rest else 0)
        output = max(1, round(request.output_tokens * self.tokens))
        if self.longest is not None:
            output = min(output, max(1, self.longest // 2))
            prompt = min(prompt, max(1, self.longest - output))
        blocks = request.blocks[: -(-prompt // block)]
        return Request((request.arrival - first) * self.time, prompt, output, blocks, block)


def azure_code(path: Path, scale: Scale = Scale()) -> list[Request]:
    """Azure LLM inference trace 2023: ``TIMESTAMP,ContextTokens,GeneratedTokens``, one line a request.

    Raises:
        TraceError: no such file, or another format.
    """
    try:
        with path.open(newline="") as file:
            rows = [
                (_seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, ValueError) as error:
        raise TraceError(f"{path}: {error!r}; expected a CSV with TIMESTAMP,ContextTokens,GeneratedTokens") from None
    start = min((row[0] for row in rows), default=0.0)
    return scale.apply(Request(at - start, max(1, prompt), max(1, output)) for at, prompt, output in rows)


def mooncake(path: Path, scale: Scale = Scale()) -> list[Request]:
    """Mooncake trace: JSON lines of ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

    A hash id names 512 tokens together with all before them. Without ``hash_ids`` (the cut that the paper's artifact
    replays) nothing is shared.

    Raises:
        TraceError: no such file, or another format.
    """
    try:
        with path.open() as file:
            return scale.apply([_mooncake_request(json.loads(line)) for line in file if line.strip()])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise TraceError(
            f"{path}: {error!r}; expected JSON lines with timestamp, input_length, output_length and hash_ids"
        ) from None


def load(path: Path, scale: Scale = Scale()) -> list[Request]:
    """A trace in either format, by the name of the file (``.csv``, ``.jsonl``).

    Raises:
        TraceError: neither.
    """
    if path.suffix == ".csv":
        return azure_code(path, scale)
    if path.suffix == ".jsonl":
        return mooncake(path, scale)
    raise TraceError(f"{path}: a trace is a .csv (Azure LLM inference 2023) or a .jsonl (Mooncake)")


def prompt_ids(request: Request, index: int, vocabulary: int, seed: int = 0, reserved: int = 0) -> list[int]:
    """The token ids of a request's prompt; the same arguments give the same ids, on any machine.

    Args:
        index: of the request in its workload; what it does not share is its own.
        vocabulary: ids are below it.
        reserved: ids are from here on, to stay clear of a tokenizer's special tokens.
    """
    block = request.block
    count = -(-request.prompt_tokens // block)
    keys: list[Any] = list(request.blocks[:count])
    keys += [f"{index}-{position}" for position in range(len(keys), count)]
    ids: list[int] = []
    choices = range(reserved, vocabulary)
    for key in keys:
        ids += random.Random(f"{seed}/{key}").choices(choices, k=block)
    return ids[: request.prompt_tokens]


def _mooncake_request(row: dict[str, Any]) -> Request:
    prompt, blocks = int(row["input_length"]), tuple(row.get("hash_ids", ()))
    if blocks and len(blocks) != -(-prompt // MOONCAKE_BLOCK):
        raise ValueError(f"{len(blocks)} hash_ids for {prompt} tokens in blocks of {MOONCAKE_BLOCK}")
    return Request(row["timestamp"] / 1000, max(1, prompt), max(1, int(row["output_length"])), blocks)


def _seconds(timestamp: str) -> float:
    moment, _, fraction = timestamp.strip().partition(".")  # seven digits of a second, datetime takes six
    return datetime.fromisoformat(moment).timestamp() + float(f"0.{fraction or 0}")
