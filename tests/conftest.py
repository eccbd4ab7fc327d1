"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.hosting import Host


class Model(Protocol):
    """A checkpoint that tests make: ``checkpoints.Tiny`` or ``families.Family``."""

    name: str

    def write(self, folder: Path) -> None: ...


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Model], Path]:
    """The folder of a tiny checkpoint, written on first use."""
    root = tmp_path_factory.mktemp("checkpoints")

    def folder(model: Model) -> Path:
        if not (root / model.name).exists():
            model.write(root / model.name)
        return root / model.name

    return folder


@pytest.fixture
def start(checkpoint, tmp_path) -> Any:
    """Start engines that are closed when the test ends: ``start(model, tp_size, **arguments)``."""
    hosts: list[Host] = []

    def start(model: Model, tp_size: int, **arguments: Any) -> Host:
        host = Host(checkpoint(model), tp_size, log=tmp_path / f"engine{len(hosts)}.log", **arguments)
        hosts.append(host)
        return host

    yield start
    for host in hosts:
        host.close()
