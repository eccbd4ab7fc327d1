"""``--shift-threshold auto``: both configurations timed at a ladder of batch sizes, and the rule that reads it.

Nothing here has a clock or a group of its own. Whoever runs the steps hands in times that all ranks have agreed on, so
that all ranks climb the same rungs and read the same threshold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median, quantiles
from typing import Any, NamedTuple

from sgl_shift.config import DEFAULT_THRESHOLD
from sgl_shift.policy import Configuration

NOISE = 0.02  # a configuration that saves less is not faster
CLEAR = 0.1  # more than this in each of the first pairs, in the same direction, needs no further pair
PAIRS, MOST_PAIRS = 5, 15
BUDGET = 2.5  # seconds, of the pairs of one kind of batch
STRIDE = 4  # tokens of a rung over those of the rung below
FINE = 1.5  # and at the threshold, once that has been looked at more closely


@dataclass
class Rung:
    """Seconds of a step of ``tokens`` tokens, in pairs that ran one after the other."""

    tokens: int
    base: list[float] = field(default_factory=list)
    shift: list[float] = field(default_factory=list)

    @property
    def savings(self) -> list[float]:
        """The part of TP's time that the base configuration saved, of each pair; negative where it took longer."""
        return [1 - base / shift for base, shift in zip(self.base, self.shift, strict=True)]

    @property
    def base_is_faster(self) -> bool:
        """By more than noise: in the median of the pairs, and in three out of four of them at all, or in all if few."""
        savings = self.savings
        few = len(savings) < PAIRS
        least = min(savings) if few else quantiles(savings, n=4, method="inclusive")[0]
        return median(savings) > NOISE and least > 0

    @property
    def is_clear(self) -> bool:
        return len(self.base) >= 3 and (min(self.savings) > CLEAR or max(self.savings) < -CLEAR)

    def regret(self, configuration: Configuration) -> float:
        """The part of the faster one's time that is lost by running in ``configuration``; TP has none within noise."""
        slower = median(base / shift for base, shift in zip(self.base, self.shift, strict=True))
        if configuration is Configuration.BASE:
            return max(0.0, slower - 1)
        return 1 / slower - 1 if self.base_is_faster else 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "pairs": len(self.base),
            "base_ms": round(median(self.base) * 1e3, 3),
            "shift_ms": round(median(self.shift) * 1e3, 3),
            "faster": str(Configuration.BASE if self.base_is_faster else Configuration.SHIFT),
        }


def best_threshold(rungs: Sequence[Rung]) -> int:
    """The threshold of least regret, summed over the rungs; of several the largest, so that TP wins within noise.

    Args:
        rungs: at least one, in order of their tokens.

    Returns:
        The tokens of a rung, or one less than the first (but not 0) if base is to run all that was measured.
    """
    candidates = [max(1, rungs[0].tokens - 1), *(rung.tokens for rung in rungs)]

    def regret(threshold: int) -> float:
        return sum(
            rung.regret(Configuration.BASE if rung.tokens > threshold else Configuration.SHIFT) for rung in rungs
        )

    return min(candidates, key=lambda threshold: (regret(threshold), -threshold))


def threshold_of(rungs: Sequence[Rung], most: int) -> int:
    """:func:`best_threshold`; where the ladder ends before ``most`` tokens and TP was not beaten, no less than the
    default: nothing speaks for base there."""
    best = best_threshold(rungs)
    return max(best, min(DEFAULT_THRESHOLD, most)) if best == rungs[-1].tokens else best


def sizes_from(first: int, admissible: Sequence[int]) -> list[int]:
    """Powers of ``STRIDE`` times ``first``, each the next of the admissible sizes (ascending), up to the largest."""
    sizes: list[int] = []
    wanted = first
    while (size := next((s for s in admissible if s >= wanted), 0)) > 0:
        sizes.append(size)
        wanted = max(STRIDE * wanted, size + 1)
    if admissible and (not sizes or sizes[-1] < admissible[-1]):
        sizes.append(admissible[-1])
    return sizes


@dataclass(frozen=True)
class Measured:
    """What a threshold was read from."""

    threshold: int
    rungs: Sequence[Rung]
    why: str = ""  # why the threshold is not the best one

    def to_dict(self) -> dict[str, Any]:
        why = {"why": self.why} if self.why else {}
        return {"threshold": self.threshold, "ladder": [rung.to_dict() for rung in self.rungs], **why}


class Step(NamedTuple):
    seconds: float  # of the forward pass
    cost: float  # seconds that it took to run it, preparations included


def climb(
    first: int, admissible: Sequence[int], run: Callable[[int, Configuration], Step], budget: float = BUDGET
) -> list[Rung]:
    """Time both configurations from small batches up, as far as ``budget`` (seconds) allows several pairs of each.

    Each size is run once untimed in both, for what is compiled or allocated the first time. Pairs go round the ladder,
    in either order in turn, so that what else the machine does meets all sizes. Then sizes between the threshold and
    the rung above are timed as well, until these are close.

    Args:
        first: the smallest size.
        admissible: sizes that may be measured, ascending.
        run: one step of a size in a configuration; the same numbers on every rank.

    Returns:
        Rungs in order of their tokens; fewer than there are sizes where the budget ends first.
    """
    order = list(Configuration)

    def pair(rung: Rung) -> float:
        cost = 0.0
        for configuration in order if len(rung.base) % 2 else reversed(order):
            step = run(rung.tokens, configuration)
            (rung.base if configuration is Configuration.BASE else rung.shift).append(step.seconds)
            cost += step.cost
        return cost

    def warmed_up(tokens: int) -> Rung:
        for configuration in order:
            run(tokens, configuration)
        return Rung(tokens)

    rungs: list[Rung] = []
    spent = last = 0.0
    for tokens in sizes_from(first, admissible):
        rungs.append(warmed_up(tokens))
        cost = pair(rungs[-1])
        spent += cost
        growth = max(1.0, cost / last) if last else 1.0
        if spent + growth * cost > budget / PAIRS:  # the next one would not leave time for the other pairs
            break
        last = cost
    for number in range(1, MOST_PAIRS):
        if (number >= PAIRS and spent > budget) or (number >= 3 and spent > 2 * budget):  # in case it is disturbed
            break
        for rung in rungs:
            if not rung.is_clear:
                spent += pair(rung)
    while between := _around_threshold(rungs, admissible):
        rungs.append(warmed_up(between))
        while len(rungs[-1].base) < PAIRS and not rungs[-1].is_clear:
            pair(rungs[-1])
        rungs.sort(key=lambda rung: rung.tokens)
    return rungs


def _around_threshold(rungs: Sequence[Rung], admissible: Sequence[int]) -> int:
    """A size between the threshold and the rung above, 0 if these are close."""
    threshold = best_threshold(rungs)
    above = next((rung.tokens for rung in rungs if rung.tokens > threshold), 0)
    if threshold < rungs[0].tokens or above <= FINE * threshold:
        return 0
    wanted = (threshold * above) ** 0.5
    return next((size for size in admissible if wanted <= size < above), 0)
