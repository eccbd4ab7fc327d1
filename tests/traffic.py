"""Scripted traffic against an engine: requests that join at given times, and some that are aborted in the middle."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tests.parity import simplify


@dataclass(frozen=True)
class Arrival:
    """A request that arrives when ``after`` others have produced their first token (0: at once)."""

    prompt: list[int]
    max_new_tokens: int
    after: int = 0
    abort_at: int | None = None  # abort once so many tokens have come
    logprob_start_len: int | None = 0  # -1: of the output only; None: no logprobs at all
    sampling: dict[str, Any] = field(default_factory=dict)


def play(engine: Any, arrivals: list[Arrival]) -> list[dict[str, Any]]:
    """Run in the host (``Host.call``): every answer, in the order of ``arrivals``; aborted ones as far as they came."""
    return engine.loop.run_until_complete(play_in_loop(engine, arrivals))


async def play_in_loop(engine: Any, arrivals: list[Arrival]) -> list[dict[str, Any]]:
    started = 0
    progress = asyncio.Condition()

    async def run(index: int, arrival: Arrival) -> dict[str, Any]:
        nonlocal started
        async with progress:
            await progress.wait_for(lambda: started >= min(arrival.after, index))
        rid = f"arrival-{index}-{id(arrivals)}"
        last: dict[str, Any] = {}
        stream = await engine.async_generate(
            input_ids=arrival.prompt,
            sampling_params={"temperature": 0, "max_new_tokens": arrival.max_new_tokens, **arrival.sampling},
            return_logprob=arrival.logprob_start_len is not None,
            logprob_start_len=arrival.logprob_start_len,
            top_logprobs_num=2,
            stream=True,
            rid=rid,
        )
        async for answer in stream:
            if not last:
                async with progress:
                    started += 1
                    progress.notify_all()
            last = answer
            if arrival.abort_at is not None and len(answer["output_ids"]) >= arrival.abort_at:
                engine.tokenizer_manager.abort_request(rid=rid)
        return simplify(last)

    return list(await asyncio.gather(*(run(i, a) for i, a in enumerate(arrivals))))
