"""The one handle on Shift Parallelism in this process; set when a rank's groups are made."""

from __future__ import annotations

from sgl_shift.forward import ShiftParallel

_shift: ShiftParallel | None = None


def current() -> ShiftParallel | None:
    return _shift


def set_current(shift: ShiftParallel) -> None:
    global _shift
    _shift = shift
