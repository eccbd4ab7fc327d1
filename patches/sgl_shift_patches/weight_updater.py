"""Weights that change at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_shift_patches import state

_WHY = (
    "Weights cannot be changed while Shift Parallelism holds a second copy of them: only one configuration would get "
    "the new ones. Restart with the new weights, or serve with --shift-mode tp."
)


def _two_copies() -> bool:
    shift = state.current()
    return shift is not None and bool(shift.base_model)


def refuse(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``WeightUpdater``'s operations, which answer (success, message)."""
    return (False, _WHY) if _two_copies() else original(updater, *args, **kwargs)


def refuse_session(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``SchedulerWeightUpdaterManager.begin_weight_update``."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    if _two_copies():
        return BeginWeightUpdateReqOutput(success=False, message=_WHY)
    return original(manager, *args, **kwargs)


def check_weights(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``ModelRunner.check_weights``; its caller answers an exception with success=False and the text."""
    if _two_copies() and kwargs.get("action") == "reset_tensors":
        raise RuntimeError(_WHY)
    return original(runner, *args, **kwargs)
