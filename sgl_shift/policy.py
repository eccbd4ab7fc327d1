"""Algorithm 2 of the paper: which configuration runs a batch."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_shift.config import Kind, Settings


class Configuration(StrEnum):
    """The two configurations a batch can run in."""

    BASE = "base"  # (SP=sp, TP=tp): sequence parallel, for large batches
    SHIFT = "shift"  # (SP=1, TP=P): stock tensor parallel, for small ones


def choose(settings: Settings, num_tokens: int, *, base_can_run: bool, kind: Kind = "decode") -> Configuration:
    """Pick the configuration for one batch.

    Args:
        settings: threshold and mode in force; the same on every rank at the same step.
        num_tokens: tokens of this batch, prefill and decode together.
        kind: a batch that mixes prefill and decode is "prefill": of two thresholds, its is decided by that one. Its
            tokens are mostly the chunk's, and rows after the last layer are few as after a prefill.
        base_can_run: whether the base model can take the batch at all; whatever it cannot take is right in stock TP.

    Only host facts that are identical on every rank may enter here: ranks that disagree wait for each other for ever.
    """
    if not base_can_run or num_tokens < 1:
        return Configuration.SHIFT
    if settings.mode == "sp":
        return Configuration.BASE
    if settings.mode == "shift" and num_tokens > settings.limit(kind):
        return Configuration.BASE
    return Configuration.SHIFT
