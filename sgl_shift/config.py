"""What the user asked for: the flags, the environment variables and the settings that can change at run time."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast, get_args

Mode = Literal["shift", "sp", "tp"]
MODES: tuple[str, ...] = get_args(Mode)
DEFAULT_THRESHOLD = 256
AUTO: Literal["auto"] = "auto"  # in place of a threshold: it is measured
# What a batch is like: "decode" has some tokens of each request and none of a new prompt; any other is "prefill".
Kind = Literal["decode", "prefill"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class ConfigError(ValueError):
    """A setting of Shift Parallelism that makes no sense; the message says what would."""


@dataclass(frozen=True)
class Settings:
    """What can be changed on a running server."""

    threshold: int = DEFAULT_THRESHOLD  # tokens; batches with more run in the base configuration
    mode: Mode = "shift"
    prefill_threshold: int | None = None  # of prefill-shaped batches, where it was measured apart

    def limit(self, kind: Kind) -> int:
        """The threshold of a batch of this kind."""
        return self.threshold if kind == "decode" or self.prefill_threshold is None else self.prefill_threshold

    def updated(self, **changes: Any) -> Settings:
        """A copy with ``threshold`` and/or ``mode`` changed; values are checked, unknown names refused.

        A threshold that is set holds for all batches.
        """
        unknown = set(changes) - {"threshold", "mode"}
        if unknown:
            raise ConfigError(f"unknown setting {', '.join(sorted(unknown))}; settings are threshold and mode")
        if "threshold" in changes:
            changes |= {"threshold": parse_threshold(changes["threshold"]), "prefill_threshold": None}
        if "mode" in changes:
            changes["mode"] = parse_mode(changes["mode"])
        return replace(self, **changes)


@dataclass(frozen=True)
class ShiftConfig:
    """The deployment's configuration; the same on every rank for the life of the server."""

    sp_size: int = 1
    settings: Settings = Settings()
    allow_untested_model: bool = False
    auto: bool = False  # thresholds are measured at start-up; until then, those of the settings hold

    @property
    def enabled(self) -> bool:
        return self.sp_size > 1

    @property
    def loads_base(self) -> bool:
        """Whether the base model is loaded at all."""
        return self.enabled and self.settings.mode != "tp"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ShiftConfig:
        return cls(**{**values, "settings": Settings(**values["settings"])})


# Keyword of Engine(...), option of the command line, environment variable: one table for all three doors.
OPTIONS: dict[str, tuple[str, str]] = {
    "sp_size": ("--sp-size", "SGL_SHIFT_SP_SIZE"),
    "shift_threshold": ("--shift-threshold", "SGL_SHIFT_THRESHOLD"),
    "shift_mode": ("--shift-mode", "SGL_SHIFT_MODE"),
    "shift_allow_untested_model": ("--shift-allow-untested-model", "SGL_SHIFT_ALLOW_UNTESTED_MODEL"),
}


def switched_on(variable: str) -> bool:
    """Whether a variable of the environment that is a plain switch is set, to anything but 0."""
    return os.environ.get(variable, "0") not in ("", "0")


def resolve(given: Mapping[str, Any], environ: Mapping[str, str]) -> ShiftConfig:
    """Merge flags (``None`` where not given) with the environment: a flag beats its variable, a variable the default.

    Raises:
        ConfigError: a value that does not parse, with the name under which it was given.
    """

    def pick(option: str) -> tuple[str, Any]:
        flag, variable = OPTIONS[option]
        if given.get(option) is not None:
            return flag, given[option]
        # SGLang warns about every SGL_ variable that it would rather have as SGLANG_ (srt/environ.py): both work.
        return variable, environ.get(variable) or environ.get(variable.replace("SGL_", "SGLANG_", 1)) or None

    settings = Settings()
    name, threshold = pick("shift_threshold")
    auto = threshold is not None and parse_threshold_or_auto(threshold, name) == AUTO
    if threshold is not None and not auto:
        settings = replace(settings, threshold=parse_threshold(threshold, name))
    name, mode = pick("shift_mode")
    if mode is not None:
        settings = replace(settings, mode=parse_mode(mode, name))
    name, sp_size = pick("sp_size")
    name_allow, allow = pick("shift_allow_untested_model")
    return ShiftConfig(
        sp_size=1 if sp_size is None else parse_sp_size(sp_size, name),
        settings=settings,
        allow_untested_model=False if allow is None else parse_bool(allow, name_allow),
        auto=auto,
    )


def parse_sp_size(value: Any, name: str = "SP size") -> int:
    return _positive(value, name, "it divides --tp-size, and 1 turns Shift Parallelism off")


def parse_threshold(value: Any, name: str = "threshold") -> int:
    return _positive(
        value, name, f"it counts tokens of a batch, the default is {DEFAULT_THRESHOLD}; {AUTO} measures it"
    )


def parse_threshold_or_auto(value: Any, name: str = "threshold") -> int | Literal["auto"]:
    return AUTO if value == AUTO else parse_threshold(value, name)


def parse_mode(value: Any, name: str = "mode") -> Mode:
    if value not in MODES:
        raise ConfigError(f"{name} {value!r} is not a mode; use one of {', '.join(MODES)}")
    return cast(Mode, value)


def parse_bool(value: Any, name: str) -> bool:
    known = {True: True, False: False, "1": True, "0": False, "true": True, "false": False}
    key = value.lower() if isinstance(value, str) else value
    if key not in known:
        raise ConfigError(f"{name} {value!r} is neither true nor false")
    return known[key]


def _positive(value: Any, name: str, hint: str) -> int:
    try:
        if isinstance(value, (bool, float)):  # True and 2.5 are numbers to int(), not to a user
            raise ValueError
        number = int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} {value!r} is not a whole number; {hint}") from None
    if number < 1:
        raise ConfigError(f"{name} {number} is below 1; {hint}")
    return number
