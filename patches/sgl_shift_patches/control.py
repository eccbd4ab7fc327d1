"""Threshold and mode on a running server, through SGLang's ``/set_internal_state`` and a method of the Engine.

SGLang hands the request to every rank at the same step of the scheduler loop, so all ranks change between the same two
batches. The request carries numbers only (``io_struct.py:SetInternalStateReq``); a mode travels as its index in MODES.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sgl_shift.config import AUTO, MODES, ConfigError, Settings, parse_mode
from sgl_shift_patches import autotune, state

logger = logging.getLogger(__name__)

THRESHOLD, MODE, MEASURE = "shift_threshold", "shift_mode", "shift_measure"


def encode(requested: dict[str, Any]) -> dict[str, Any]:
    """Replace what is not a number: the name of a mode by its index, the threshold ``auto`` by a key of its own.

    Raises:
        ConfigError: an unknown mode.
    """
    if isinstance(requested.get(MODE), str):
        requested = {**requested, MODE: MODES.index(parse_mode(requested[MODE], MODE))}
    if requested.get(THRESHOLD) == AUTO:
        requested = {**{key: value for key, value in requested.items() if key != THRESHOLD}, MEASURE: 1}
    return requested


def request_schema(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around ``SetInternalStateReq.__get_pydantic_core_schema__``: the HTTP body may name the mode and say ``auto``."""
    from pydantic_core import core_schema

    def encode_body(body: Any) -> Any:
        if isinstance(body, dict) and isinstance(body.get("server_args"), dict):
            return {**body, "server_args": encode(body["server_args"])}
        return body

    return core_schema.no_info_before_validator_function(encode_body, original(*args, **kwargs))


def name_app_for_workers() -> None:
    """Have tokenizer workers import the app through ours, unless the user names an app of their own."""
    from sglang.srt.environ import envs

    if not envs.SGLANG_HTTP_SERVER_APP_PATH.is_set():
        envs.SGLANG_HTTP_SERVER_APP_PATH.set("sgl_shift_patches.http_app:app")


def update_handlers(handlers: dict[str, Any], controller: Any) -> dict[str, Any]:
    """After ``SchedulerInternalStateController._update_handlers``: three more."""
    from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler

    def changed(key: str, value: Any) -> Settings:
        shift = state.current()
        assert shift is not None  # the hook is installed in ranks that have it
        try:
            if key == THRESHOLD:
                settings = shift.settings.updated(threshold=int(value) if value == int(value) else value)
            else:
                settings = shift.settings.updated(mode=MODES[int(value)] if value in range(len(MODES)) else value)
        except ConfigError as error:
            raise UpdateRejected(str(error)) from None
        if settings.mode != "tp" and not shift.base_model:
            raise UpdateRejected("the server was started with --shift-mode tp: there is no base model to switch to")
        if frozen := shift.frozen(settings):
            held = "; ".join(f"{kind} graphs of {_ranges(sizes)} tokens" for kind, sizes in frozen.items())
            raise UpdateRejected(
                f"CUDA graphs cannot follow threshold {settings.threshold}, mode {settings.mode}: {held} hold the "
                "other configuration; restart with these settings, or with --disable-cuda-graph"
            )
        return settings

    def apply(key: str, value: Any) -> None:
        shift = state.current()
        assert shift is not None
        shift.settings = changed(key, value)
        if key == THRESHOLD:
            shift.measured = {}  # what is shown would not be what is in force
        if shift.exporter is not None:
            shift.exporter.publish()
        if shift.rank == 0:
            settings = shift.settings
            logger.info("Shift Parallelism: threshold %d, mode %s", settings.threshold, settings.mode)

    def can_measure(key: str, value: Any) -> None:
        shift = state.current()
        assert shift is not None
        if value != 1:
            raise UpdateRejected(f"{key} {value} is not 1; it measures thresholds, as {THRESHOLD} {AUTO!r} does")
        if not shift.base_model:
            raise UpdateRejected("the server was started with --shift-mode tp: there is no base model to measure")

    def measure(_key: str, _value: Any) -> None:
        shift = state.current()
        assert shift is not None
        autotune.measure(shift, controller.scheduler.tp_worker.model_runner.eager_runner)
        if shift.exporter is not None:
            shift.exporter.publish()

    handler = _UpdateHandler(lambda key, value: changed(key, value) and None, apply)
    return {**handlers, THRESHOLD: handler, MODE: handler, MEASURE: _UpdateHandler(can_measure, measure)}


def _ranges(sizes: list[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
