"""What comes out of a simulation: each request's times, and the steps that served them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from sgl_shift.policy import Configuration
from sgl_shift.traces import Request


class Served(NamedTuple):
    """What became of a request; times in seconds after the start."""

    request: Request
    arrival: float
    first: float  # first token
    finish: float
    cached: int  # prompt tokens that were in the prefix cache

    @property
    def ttft(self) -> float:
        return self.first - self.arrival

    @property
    def tpot(self) -> float:
        """Seconds a token after the first; 0 for a single token."""
        return (self.finish - self.first) / max(1, self.request.output_tokens - 1)

    @property
    def completion(self) -> float:
        return self.finish - self.arrival


class Stretch(NamedTuple):
    """Steps in a row that are alike."""

    start: float
    seconds: float  # of all of them
    steps: int
    tokens: int  # of all of them
    configuration: Configuration
    kv_used: int  # at the end
    replica: int


@dataclass
class Result:
    served: list[Served] = field(default_factory=list)
    stretches: list[Stretch] = field(default_factory=list)
    preemptions: int = 0
    refused: int = 0  # requests that do not fit into the KV cache at all

    @property
    def seconds(self) -> float:
        """Until the last request was finished."""
        return max((s.finish for s in self.served), default=0.0)

    @property
    def throughput(self) -> float:
        """Prompt and output tokens a second, over the whole run."""
        return sum(s.request.prompt_tokens + s.request.output_tokens for s in self.served) / (self.seconds or 1.0)

    def peak_throughput(self, window: float = 10.0) -> float:
        """The most tokens a second that steps processed in any window of the run."""
        bins: dict[int, float] = {}
        for stretch in self.stretches:  # spread evenly over the bins that it covers
            at, end = stretch.start, stretch.start + stretch.seconds
            while at < end:
                edge = min(end, (math.floor(at / window) + 1) * window)
                edge = edge if edge > at else end
                index = math.floor(at / window)
                bins[index] = bins.get(index, 0.0) + stretch.tokens * (edge - at) / stretch.seconds
                at = edge
        return max(bins.values(), default=0.0) / window

    def quantile(self, of: Callable[[Served], float], q: float = 0.5) -> float:
        values = sorted(of(s) for s in self.served)
        return values[min(len(values) - 1, math.ceil(q * len(values)) - 1)] if q < 1 else values[-1]

    def median(self, of: Callable[[Served], float]) -> float:
        return statistics.median(of(s) for s in self.served)

    def mean(self, of: Callable[[Served], float]) -> float:
        return statistics.fmean(of(s) for s in self.served)

    def steps_in(self, configuration: Configuration) -> int:
        return sum(s.steps for s in self.stretches if s.configuration is configuration)
