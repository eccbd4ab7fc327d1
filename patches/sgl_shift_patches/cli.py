"""The flags, and how what they said reaches every process."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from sgl_shift import config
from sgl_shift.config import ConfigError, ShiftConfig

# SGLang's ServerArgs pickles underscore attributes along with its fields (server_args.py:ServerArgs.__reduce__), so the
# configuration rides on it into every scheduler.
_ATTRIBUTE = "_shift_parallel"
_CHECKED = "_shift_parallel_checked"


class Carried(dict[str, Any]):
    """A configuration on its way: loads the plugin where it arrives.

    Not every process that gets arguments loads plugins, or before it resolves them: a server in a process of its own
    does not (``engine.py:_launch_subprocesses`` resolves first), nor does a rank of ``sglang.benchmark.one_batch``.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (dict(self),)


def arrive(configuration: dict[str, Any]) -> Carried:
    from sglang.srt.plugins import load_plugins

    from sgl_shift_patches import registry

    load_plugins()
    registry.install(registry.HTTP)  # a server here may import its app before it resolves the arguments
    return Carried(configuration)


def add_cli_args(_result: None, parser: argparse.ArgumentParser) -> None:
    """After ``ServerArgs.add_cli_args``: the flags of Shift Parallelism. None means that a flag was not given."""
    group = parser.add_argument_group("Shift Parallelism (sgl-shift)")
    group.add_argument(
        "--sp-size",
        "--sequence-parallel-size",
        dest="sp_size",
        type=_parsed(config.parse_sp_size),
        default=None,
        metavar="N",
        help="Sequence-parallel degree of the base configuration; divides --tp-size. 1, the default, leaves SGLang as "
        "it is.",
    )
    group.add_argument(
        "--shift-threshold",
        type=_parsed(config.parse_threshold_or_auto),
        default=None,
        metavar="TOKENS|auto",
        help=f"Batches with more tokens run in the base configuration (default {config.DEFAULT_THRESHOLD}); "
        "auto measures both configurations on this machine when the server starts.",
    )
    group.add_argument(
        "--shift-mode",
        choices=config.MODES,
        default=None,
        help="shift: choose per batch (default); sp: always the base configuration; tp: the base model is not loaded.",
    )
    group.add_argument(
        "--shift-allow-untested-model",
        action="store_true",
        default=None,
        help="Accept a model architecture that is not tested with Shift Parallelism, at the risk of wrong answers.",
    )


def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Around ``ServerArgs.from_cli_args``: keep what the flags (or else the environment) said."""
    given = {option: getattr(args, option, None) for option in config.OPTIONS}
    return _attach(original(cls, args), config.resolve(given, os.environ))


def server_args_from_kwargs(**kwargs: Any) -> Any:
    """``Engine.server_args_class``: ``Engine(sp_size=..., shift_threshold=..., shift_mode=...)``."""
    from sglang.srt.server_args import ServerArgs

    given = {option: kwargs.pop(option, None) for option in config.OPTIONS}
    return _attach(ServerArgs(**kwargs), config.resolve(given, os.environ))


def config_of(server_args: Any) -> ShiftConfig:
    """The configuration that came with ``server_args``, or the environment's if they were made without our doors."""
    carried = getattr(server_args, _ATTRIBUTE, None)
    if carried is not None:
        return ShiftConfig.from_dict(carried)
    return config.resolve({}, os.environ)


def mark_checked(server_args: Any, shift: ShiftConfig) -> None:
    """Note on the arguments that the launcher checked this deployment; ranks insist on it."""
    _attach(server_args, shift)
    setattr(server_args, _CHECKED, True)


def was_checked(server_args: Any) -> bool:
    return getattr(server_args, _CHECKED, False)


def _attach(server_args: Any, shift: ShiftConfig) -> Any:
    carried = shift.to_dict()
    setattr(server_args, _ATTRIBUTE, Carried(carried) if shift.enabled else carried)
    return server_args


def _parsed(parse: Callable[[Any], Any]) -> Callable[[str], Any]:
    def typed(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed
