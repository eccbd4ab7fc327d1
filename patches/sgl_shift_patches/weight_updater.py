"""Weights that change at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_shift_patches import state


def refuse(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``WeightUpdater``'s operations: (False, why) where only the stock model would get the new weights."""
    shift = state.current()
    if shift is None or not shift.base_model:
        return original(updater, *args, **kwargs)
    return False, (
        "Weights cannot be updated while Shift Parallelism holds a second copy of them: only one configuration would "
        "get the new ones. Restart with the new weights, or serve with --shift-mode tp."
    )
