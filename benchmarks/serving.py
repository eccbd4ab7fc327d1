"""Deployments of one model as servers: their commands, their start, their end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.network import SlowNetwork
from sgl_shift import deployment
from sgl_shift.hardware import Profile
from sgl_shift.layout import Layout
from sgl_shift.shape import ModelShape
from sgl_shift_patches import cpu_platform
from tests.footprint import alive
from tests.servers import free_port, users_environment

READY = "The server is fired up"
NAMES = ("TP", "DP", "SP", "Shift")
PORT = 30500  # in a namespace, where nobody else listens


class ServerError(RuntimeError):
    """A server that did not start, or ended; with the end of its log."""


@dataclass(frozen=True)
class Served:
    """One of the four deployments of ``ranks`` ranks.

    Attributes:
        name: ``TP`` and ``DP`` are stock SGLang, without the plugin.
        kv_tokens: of each replica.
    """

    name: str
    ranks: int
    threshold: int
    kv_tokens: int

    @classmethod
    def within(
        cls, name: str, model: ModelShape, profile: Profile, ranks: int, threshold: int, budget: float
    ) -> Served:
        """With the KV cache that ``budget`` bytes a rank leave beside the weights.

        Raises:
            DoesNotFitError: none.
        """
        return cls(
            name,
            ranks,
            threshold,
            deployment.Deployment.of(name, model, profile, layout(name, ranks), budget).kv_tokens,
        )

    @property
    def ours(self) -> bool:
        return self.name in ("SP", "Shift")

    @property
    def replicas(self) -> int:
        return self.ranks if self.name == "DP" else 1

    def arguments(self, across_nodes: bool) -> list[str]:
        """Of SGLang. Across nodes, DP is one server a rank: stock SGLang's ``--dp-size`` is of one node."""
        given = ["--max-total-tokens", str(self.kv_tokens)]
        if self.name == "DP":
            return given if across_nodes else [*given, "--dp-size", str(self.ranks)]
        given += ["--tp-size", str(self.ranks)]
        if self.ours:
            mode = "sp" if self.name == "SP" else "shift"
            given += ["--sp-size", str(self.ranks), "--shift-threshold", str(self.threshold), "--shift-mode", mode]
        return given


def layout(name: str, ranks: int) -> Layout:
    """Of one replica: in its base configuration, for ours."""
    return {"TP": Layout(ranks, 1), "DP": Layout(1, 1)}.get(name, Layout(ranks, ranks))


@dataclass(frozen=True)
class Running:
    """A deployment that answers.

    Attributes:
        urls: requests are dealt to them in turn.
        sessions: of its processes.
    """

    urls: list[str]
    sessions: list[int]
    network: SlowNetwork | None


@contextlib.contextmanager
def running(
    served: Served, model: Path, arguments: list[str], network: SlowNetwork | None, logs: Path, seconds: float
) -> Iterator[Running]:
    """Start it, wait until it answers, and end it with all of its processes, whatever happens.

    Raises:
        ServerError: it does not start within ``seconds``, or ends.
    """
    common = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *arguments]
    common += served.arguments(network is not None)
    environment = users_environment() | ({} if served.ours else {"SGLANG_PLUGINS": "none"})
    on_cpu = not cpu_platform.accelerators()
    if on_cpu:
        environment["SGLANG_PLATFORM"] = cpu_platform.NAME
    commands: list[tuple[list[str], dict[str, str]]] = []
    if network is None:
        port = free_port()
        urls = [f"http://127.0.0.1:{port}"]
        commands.append(([*common, "--port", str(port)], environment))
    else:
        urls = [f"http://{network.address(rank)}:{PORT}" for rank in range(served.replicas)]
        for rank in range(served.ranks):
            node = [*common, "--host", network.address(rank), "--port", str(PORT)]
            if served.replicas == 1:
                node += ["--nnodes", str(served.ranks), "--node-rank", str(rank)]
                node += ["--dist-init-addr", f"{network.address(0)}:5555"]
            own = _core_of(rank, served.ranks) if on_cpu else {}
            commands.append((network.command(rank, node), {**environment, **own, **network.environment(rank)}))
    processes: list[subprocess.Popen[bytes]] = []
    files = [logs.with_suffix(f".{index}.log") for index in range(len(commands))]
    try:
        for (command, env), log in zip(commands, files, strict=True):
            with log.open("wb") as out:
                processes.append(
                    subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
                )
        _wait(processes, files, len(urls), seconds)
        yield Running(urls, [process.pid for process in processes], network)
    finally:
        end(processes)


def _core_of(rank: int, ranks: int) -> dict[str, str]:
    """Threads of one node, of as many as there are ranks: it does not see the others. Same as the CPU platform's."""
    everyone = cpu_platform.thread_environment(ranks)
    bound = everyone["SGLANG_CPU_OMP_THREADS_BIND"].split("|")[rank]
    return {**everyone, "SGLANG_CPU_OMP_THREADS_BIND": "|".join([bound] * ranks)}


def _wait(processes: list[Any], logs: list[Path], serving: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all(READY in log.read_text(errors="replace") for log in logs[:serving]):
        for process, log in zip(processes, logs, strict=True):
            if process.poll() is not None:
                raise ServerError(
                    f"a server ended with {process.returncode}\n{log.read_text(errors='replace')[-3000:]}"
                )
        if time.monotonic() > deadline:
            raise ServerError(f"not ready in {seconds:.0f} s\n{logs[0].read_text(errors='replace')[-3000:]}")
        time.sleep(0.5)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to all, half a minute, then SIGKILL to all that is left of their sessions. A second Ctrl-C waits."""
    with _undisturbed():
        _end(processes)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    before = {
        number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + 30
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in processes:
        while left := alive(process.pid):
            for orphan in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan.pid, signal.SIGKILL)
            time.sleep(0.1)
        process.wait()
