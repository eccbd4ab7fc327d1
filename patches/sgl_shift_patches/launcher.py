"""No server starts unless every rank came up with the same configuration."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from sgl_shift.config import ShiftConfig
from sgl_shift_patches import cli, metrics, state
from sgl_shift_patches.groups import RanksDifferError

_KEY = "shift_parallel"


def _signature(config: ShiftConfig) -> str:
    return json.dumps(config.to_dict(), sort_keys=True)


def scheduler_init_info(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """After ``Scheduler.get_init_info``: what this rank runs, in its ready message. Counting starts here."""
    shift = state.current()
    if shift is None:
        return info
    shift.stats.clear()  # warm-up batches are not the user's
    shift.exporter = metrics.exporter(shift, scheduler)
    return {**info, _KEY: _signature(shift.config)}


def controller_init_info(info: dict[str, Any], controller: Any) -> dict[str, Any]:
    """After ``DataParallelController.get_init_info``: hand the ranks' word on if they all say the same."""
    said = {rank_info.get(_KEY) for rank_info in controller._scheduler_init_infos}
    if len(said) == 1 and None not in said:
        return {**info, _KEY: said.pop()}
    return info


def _compare(shift: ShiftConfig, index: int, info: dict[str, Any]) -> None:
    expected = _signature(shift)
    if info.pop(_KEY, None) != expected:
        raise RanksDifferError(
            f"scheduler {index} came up without Shift Parallelism, or with another configuration than "
            f"{expected}: see its log for a plugin or hook that failed. The server does not start."
        )


def start_smg_schedulers(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    """Around smg-grpc-servicer's ``_start_scheduler_processes``: its own launcher, which answers the first rank's
    ready message. Ranks that differ from that one stopped when they met."""
    info = original(server_args, *args, **kwargs)
    _compare(cli.config_of(server_args), 0, info)
    return info


def launch_scheduler_processes(
    original: Callable[..., Any], cls: type, server_args: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ``Engine._launch_scheduler_processes``: compare the ready messages with what was asked for."""
    result, processes = original(cls, server_args, *args, **kwargs)
    shift = cli.config_of(server_args)
    if not shift.enabled:
        return result, processes
    wait_for_ready = result.wait_for_ready

    def wait_and_compare() -> None:
        wait_for_ready()
        for index, info in enumerate(result.scheduler_infos):
            _compare(shift, index, info)

    result.wait_for_ready = wait_and_compare
    return result, processes
