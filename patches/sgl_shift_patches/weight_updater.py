"""Weights that change at run time change in both configurations.

SGLang writes them into the stock model. Its weights are views of the base model's, so this rank's shard has changed
there as well; those of the other SP ranks are gathered when an update is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sgl_shift.forward import ShiftParallel
from sgl_shift_patches import state, weights


def _why_not(shift: ShiftParallel | None) -> str:
    """Why weights cannot change, or nothing."""
    if shift is None or not shift.why_separate:
        return ""
    return (
        "Weights cannot be changed while the base configuration of Shift Parallelism has a copy of its own "
        f"({shift.why_separate}): only one configuration would get the new ones. Restart with the new weights, or "
        "serve with --shift-mode tp."
    )


def refuse(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``WeightUpdater``'s operations, which answer (success, message)."""
    why = _why_not(state.current())
    return (False, why) if why else original(updater, *args, **kwargs)


def refuse_session(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``SchedulerWeightUpdaterManager.begin_weight_update``."""
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    if why := _why_not(state.current()):
        return BeginWeightUpdateReqOutput(success=False, message=why)
    return original(manager, *args, **kwargs)


def check_weights(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``ModelRunner.check_weights``; its caller answers an exception with success=False and the text."""
    shift = state.current()
    resets = kwargs.get("action") == "reset_tensors"
    if resets and (why := _why_not(shift)):
        raise RuntimeError(why)
    result = original(runner, *args, **kwargs)
    if resets and shift is not None:
        weights.gather(shift)
    return result


def gather(result: Any, _manager: Any, *args: Any) -> Any:
    """After ``SchedulerWeightUpdaterManager``'s operations that complete an update, whether it succeeded or was rolled
    back: every rank answers the same request, so all of them come here."""
    shift = state.current()
    if shift is not None:
        weights.gather(shift)
    return result


BASE = "sgl_shift base model"


def export_static_state(original: Callable[..., Any], model: Any) -> Any:
    """Around ``_export_static_state``: buffers are not part of a checkpoint, and are kept aside while the memory of the
    weights is released."""
    kept = original(model)
    shift = state.current()
    if shift is not None and shift.base_model:
        kept[BASE] = original(shift.base_model[0])
    return kept


def import_static_state(original: Callable[..., Any], model: Any, kept: Any) -> None:
    """Around ``_import_static_state``."""
    original(model, kept)
    shift = state.current()
    if shift is not None and BASE in kept:
        original(shift.base_model[0], kept[BASE])
