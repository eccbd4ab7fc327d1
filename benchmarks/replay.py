"""The client: sends a workload to a deployment at its arrival times, and notes what came back when.

SGLang's own client (``sglang.benchmark.serving``) does not serve here: it times a request by the *text* that streams,
which a server without a tokenizer has not, and it does not keep the token ids that are to be compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import aiohttp

from sgl_shift.traces import Request, prompt_ids

TIE = 1e-3  # nats between the two best tokens below which float32 kernels of different shapes may choose either
ROUNDED_TIE = 0.2  # the same for bfloat16 and FP8, whose last digit is 0.4 and 6% of a value


class Phase(NamedTuple):
    """A workload that is replayed by itself, on an empty cache.

    Attributes:
        one_by_one: each request is sent when the one before is done, whatever its arrival.
    """

    name: str
    requests: tuple[Request, ...]
    one_by_one: bool = False


@dataclass
class Record:
    """What happened to one request. Times are seconds since the phase began.

    Attributes:
        arrival: when it was to be sent; latencies count from ``sent``.
        tokens: the answer's ids; ``at``: when each of them came.
    """

    index: int
    arrival: float
    prompt_tokens: int
    sent: float = 0.0
    cached_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    at: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.at[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """None for an answer of one token."""
        return (self.at[-1] - self.at[0]) / (len(self.at) - 1) if len(self.at) > 1 else None

    @property
    def completion(self) -> float:
        return self.at[-1] - self.sent


class Client:
    """Of one deployment; requests are dealt to its servers in turn."""

    def __init__(self, urls: Sequence[str], vocabulary: int, poll_seconds: float = 2.0, tie: float = TIE) -> None:
        self.urls, self.vocabulary, self.poll_seconds, self.tie = list(urls), vocabulary, poll_seconds, tie

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(timeout=timeout, connector=connector, read_bufsize=1 << 22)
        return self

    async def __aexit__(self, *exc: Any) -> None:
        await self._http.close()

    async def play(self, phase: Phase, progress: Callable[[str], None]) -> tuple[list[Record], list[dict[str, Any]]]:
        """Replay ``phase``: a record of each request, and samples of the counters of Shift Parallelism over time."""
        prompts = [prompt_ids(request, i, self.vocabulary) for i, request in enumerate(phase.requests)]
        records = [Record(i, r.arrival, r.prompt_tokens) for i, r in enumerate(phase.requests)]
        samples: list[dict[str, Any]] = []
        begun = time.perf_counter()

        async def one(i: int) -> None:
            if not phase.one_by_one:
                await asyncio.sleep(max(0.0, begun + phase.requests[i].arrival - time.perf_counter()))
            await self._send(prompts[i], phase.requests[i].output_tokens, records[i], begun)

        async def sample() -> None:
            samples.append({"at": time.perf_counter() - begun, **await self.counters()})
            done = sum(
                bool(r.error) or len(r.at) == q.output_tokens for r, q in zip(records, phase.requests, strict=True)
            )
            progress(f"{phase.name}: {done} of {len(records)} requests, {samples[-1]['at']:.0f} s")

        async def watch() -> None:
            while True:
                await asyncio.sleep(self.poll_seconds)
                await sample()

        await sample()
        samples[0]["at"], begun = 0.0, time.perf_counter()
        if phase.one_by_one:  # a question to the scheduler would disturb the only request, so between two
            for i in range(len(prompts)):
                await one(i)
                await sample()
            return records, samples
        watching = asyncio.ensure_future(watch())
        try:
            await asyncio.gather(*map(one, range(len(prompts))))
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # anything else that it met is the run's failure
                await watching
        await sample()
        return records, samples

    async def _send(self, prompt: list[int], output_tokens: int, record: Record, begun: float) -> None:
        """Stream one answer into ``record``; what goes wrong is noted there."""
        sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
        record.sent = time.perf_counter() - begun
        try:
            async with self._http.post(self._url(record.index) + "/generate", json=body) as answer:
                if answer.status != 200:
                    raise aiohttp.ClientError(f"{answer.status}: {(await answer.text())[:300]}")
                async for line in answer.content:
                    data = line.strip().removeprefix(b"data:").strip()
                    if not data or data == b"[DONE]":
                        continue
                    chunk, now = json.loads(data), time.perf_counter() - begun
                    if "error" in chunk:
                        raise aiohttp.ClientError(str(chunk["error"])[:300])
                    record.cached_tokens = chunk["meta_info"].get("cached_tokens", 0)
                    record.tokens += chunk["output_ids"]  # --incremental-streaming-output: what is new
                    record.at += [now] * len(chunk["output_ids"])
            if len(record.tokens) != output_tokens:
                record.error = f"{len(record.tokens)} of {output_tokens} tokens came"
        except (aiohttp.ClientError, ValueError, KeyError, OSError) as error:
            record.error = repr(error)

    def _url(self, index: int) -> str:
        return self.urls[index % len(self.urls)]

    async def state(self) -> dict[str, Any]:
        """Of the first server's scheduler (``/server_info``); the others are asked as well, to burden all alike."""
        states = []
        for url in self.urls:
            async with self._http.get(url + "/server_info") as answer:
                states.append((await answer.json())["internal_states"][0])
        return states[0]

    async def counters(self) -> dict[str, Any]:
        """Of Shift Parallelism, since the server is ready; empty from stock SGLang."""
        return (await self.state()).get("shift_parallel", {})

    async def flush(self) -> None:
        """Empty the prefix caches of an idle deployment."""
        for url in self.urls:
            async with self._http.post(url + "/flush_cache", params={"timeout": 30}) as answer:
                answer.raise_for_status()

    async def is_tie(self, request: Request, index: int, common: list[int]) -> bool:
        """Whether the two best tokens after the prompt and ``common`` are as good as equal."""
        prompt = prompt_ids(request, index, self.vocabulary) + common
        body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}}
        body |= {"return_logprob": True, "top_logprobs_num": 2}
        async with self._http.post(self._url(index) + "/generate", json=body) as answer:
            first, second = (await answer.json())["meta_info"]["output_top_logprobs"][0][:2]
        return bool(first[0] - second[0] < self.tie)

    async def differences(self, phase: Phase, expected: list[list[int]], records: list[Record]) -> dict[str, Any]:
        """How the answers differ from the expected ones; those that part at a tie are counted as ties."""
        found: dict[str, Any] = {"compared": len(records), "ties": 0, "different": []}
        for request, right, record in zip(phase.requests, expected, records, strict=True):
            if record.error or record.tokens == right:
                continue
            at = next((i for i, (a, b) in enumerate(zip(right, record.tokens, strict=False)) if a != b), None)
            if at is not None and await self.is_tie(request, record.index, right[:at]):
                found["ties"] += 1
            else:
                found["different"].append(record.index)
        return found


def to_dict(record: Record) -> dict[str, Any]:
    return asdict(record)
