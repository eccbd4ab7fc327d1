"""Counters of what ran where. Plain integers, added to once per batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from sgl_shift.policy import Configuration


def _zeros() -> dict[Configuration, int]:
    return dict.fromkeys(Configuration, 0)


@dataclass
class Stats:
    batches: dict[Configuration, int] = field(default_factory=_zeros)
    tokens: dict[Configuration, int] = field(default_factory=_zeros)
    padding_tokens: int = 0  # rows of zeros that made base batches divisible by the SP degree, of all ranks together
    bytes_sent: dict[str, int] = field(default_factory=lambda: {"all_to_all": 0, "all_gather": 0})
    switches: int = 0
    last: Configuration | None = None
    _looked_at: dict[Configuration, int] = field(default_factory=_zeros)

    @property
    def total(self) -> int:
        return sum(self.batches.values())

    def record(self, configuration: Configuration, num_tokens: int, padding_tokens: int = 0) -> None:
        self.batches[configuration] += 1
        self.tokens[configuration] += num_tokens
        self.padding_tokens += padding_tokens
        self.switches += self.last is not None and self.last != configuration
        self.last = configuration

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What runs inside is not counted."""
        before = copy.deepcopy(vars(self))
        try:
            yield
        finally:
            vars(self).update(before)

    def clear(self) -> None:
        vars(self).update(vars(Stats()))

    def shares(self) -> dict[Configuration, float]:
        """The part of the batches since the last call that each configuration ran; empty if there were none."""
        since = {c: n - self._looked_at[c] for c, n in self.batches.items()}
        self._looked_at = dict(self.batches)
        total = sum(since.values())
        return {c: n / total for c, n in since.items()} if total else {}

    def to_dict(self) -> dict[str, Any]:
        return {
            "batches": {str(c): n for c, n in self.batches.items()},
            "tokens": {str(c): n for c, n in self.tokens.items()},
            "padding_tokens": self.padding_tokens,
            "bytes_sent": dict(self.bytes_sent),
            "switches": self.switches,
        }


class Exporter(Protocol):
    """Where the counters of a rank go to be watched. Only ranks that report have one."""

    def step(self) -> AbstractContextManager[Any]:
        """Entered around the forward of each batch, to time it."""

    def publish(self) -> None:
        """Bring what is exported up to the counters and the settings."""
