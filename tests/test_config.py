"""What the user asked for: flags, environment, run-time settings, and the decision that they lead to."""

from __future__ import annotations

import argparse
import pickle

import pytest

from sgl_shift.config import ConfigError, Settings, ShiftConfig, resolve
from sgl_shift.policy import Configuration, choose


def test_nothing_given_leaves_sglang_as_it_is():
    shift = resolve({}, {})
    assert shift == ShiftConfig(sp_size=1, settings=Settings(threshold=256, mode="shift"))
    assert not shift.enabled


def test_a_flag_beats_its_variable_and_a_variable_the_default():
    environ = {"SGL_SHIFT_SP_SIZE": "4", "SGL_SHIFT_THRESHOLD": "64", "SGL_SHIFT_MODE": "sp"}
    assert resolve({}, environ) == ShiftConfig(4, Settings(64, "sp"))
    given = {"sp_size": 8, "shift_threshold": 100, "shift_mode": "tp"}
    assert resolve(given, environ) == ShiftConfig(8, Settings(100, "tp"))
    assert resolve({}, {"SGLANG_SHIFT_SP_SIZE": "4"}).sp_size == 4  # as SGLang advises whoever says SGL_
    assert resolve({"sp_size": None}, {"SGL_SHIFT_SP_SIZE": ""}).sp_size == 1


@pytest.mark.parametrize(
    ("given", "environ", "message"),
    [
        ({"shift_threshold": 0}, {}, "--shift-threshold 0 is below 1"),
        ({"shift_threshold": "many"}, {}, "--shift-threshold 'many' is not a whole number"),
        ({"shift_threshold": 2.5}, {}, "--shift-threshold 2.5 is not a whole number"),
        ({"shift_threshold": True}, {}, "--shift-threshold True is not a whole number"),
        ({}, {"SGL_SHIFT_THRESHOLD": "-3"}, "SGL_SHIFT_THRESHOLD -3 is below 1"),
        ({}, {"SGL_SHIFT_SP_SIZE": "two"}, "SGL_SHIFT_SP_SIZE 'two' is not a whole number"),
        ({"sp_size": 0}, {}, "--sp-size 0 is below 1"),
        ({"shift_mode": "ulysses"}, {}, "--shift-mode 'ulysses' is not a mode; use one of shift, sp, tp"),
        ({}, {"SGL_SHIFT_ALLOW_UNTESTED_MODEL": "maybe"}, "neither true nor false"),
    ],
)
def test_what_makes_no_sense_is_refused_under_the_name_it_was_given_by(given, environ, message):
    with pytest.raises(ConfigError, match=message):
        resolve(given, environ)


def test_settings_change_only_to_what_makes_sense():
    settings = Settings()
    assert settings.updated(threshold="7", mode="sp") == Settings(7, "sp")
    with pytest.raises(ConfigError, match="unknown setting treshold"):
        settings.updated(treshold=7)
    with pytest.raises(ConfigError, match="below 1"):
        settings.updated(threshold=0)


def test_configuration_survives_the_way_to_another_process():
    shift = ShiftConfig(4, Settings(9, "sp"), allow_untested_model=True)
    assert ShiftConfig.from_dict(pickle.loads(pickle.dumps(shift.to_dict()))) == shift


@pytest.mark.parametrize(
    ("mode", "tokens", "base_can_run", "expected"),
    [
        ("shift", 256, True, "shift"),  # exactly the threshold
        ("shift", 257, True, "base"),
        ("shift", 5000, False, "shift"),  # whatever the base model cannot take
        ("sp", 1, True, "base"),
        ("sp", 0, True, "shift"),  # an idle batch
        ("sp", 5, False, "shift"),
        ("tp", 5000, True, "shift"),
    ],
)
def test_decision(mode, tokens, base_can_run, expected):
    assert choose(Settings(mode=mode), tokens, base_can_run=base_can_run) == Configuration(expected)


def test_flags_are_parsed_and_explained():
    from sgl_shift_patches import cli

    parser = argparse.ArgumentParser()
    cli.add_cli_args(None, parser)
    args = parser.parse_args(["--sequence-parallel-size", "4", "--shift-threshold", "12", "--shift-mode", "sp"])
    assert (args.sp_size, args.shift_threshold, args.shift_mode) == (4, 12, "sp")
    with pytest.raises(SystemExit):
        parser.parse_args(["--shift-threshold", "0"])


def test_a_mode_travels_as_a_number_and_comes_back():
    from sgl_shift.config import MODES
    from sgl_shift_patches import control

    assert control.encode({"shift_mode": "sp", "shift_threshold": 3}) == {"shift_mode": 1, "shift_threshold": 3}
    assert MODES[1] == "sp"
    with pytest.raises(ConfigError, match="not a mode"):
        control.encode({"shift_mode": "both"})
