"""Counters of what ran where. Plain integers, added to once per batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sgl_shift.policy import Configuration


def _zeros() -> dict[Configuration, int]:
    return dict.fromkeys(Configuration, 0)


@dataclass
class Stats:
    batches: dict[Configuration, int] = field(default_factory=_zeros)
    tokens: dict[Configuration, int] = field(default_factory=_zeros)
    switches: int = 0
    last: Configuration | None = None

    @property
    def total(self) -> int:
        return sum(self.batches.values())

    def record(self, configuration: Configuration, num_tokens: int) -> None:
        self.batches[configuration] += 1
        self.tokens[configuration] += num_tokens
        self.switches += self.last is not None and self.last != configuration
        self.last = configuration

    def to_dict(self) -> dict[str, Any]:
        return {
            "batches": {str(c): n for c, n in self.batches.items()},
            "tokens": {str(c): n for c, n in self.tokens.items()},
            "switches": self.switches,
        }
