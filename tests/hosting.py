"""Real SGLang engines for tests, quick to start.

Importing SGLang takes some 25 s a process, and an engine is P + 2 processes. So the test process imports it once and
forks: a *host* process for each engine, whose ranks are forked from the host in turn. Nothing of SGLang is configured
before the fork, plugins are loaded in the host. That SGLang's own way of starting (spawn) works as well is tested with
the servers of ``test_server.py``.

``SGLANG_PLUGINS=none`` in a host gives stock SGLang: the oracle.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.servers import Server

# Before SGLang is imported: it picks its platform then, and OpenMP its threads.
os.environ.update(
    SGLANG_PLATFORM="sgl_shift_cpu",
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    TORCH_COMPILE_DISABLE="1",
    SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK="0",
    SGLANG_CPU_OMP_THREADS_BIND="|".join(str(rank % len(os.sched_getaffinity(0))) for rank in range(16)),
)

# A process that has started OpenMP threads cannot be forked: the child waits for threads that it does not have.
torch.set_num_threads(1)

STARTUP_SECONDS = 120
CALL_SECONDS = 300


def import_sglang() -> None:
    import sglang.srt.entrypoints.engine
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.model_executor.model_runner
    import sglang.srt.models.registry  # noqa: F401


class HostDied(RuntimeError):
    pass


class Host:
    """An Engine in a process of its own. Arguments that are not named here are the Engine's."""

    def __init__(
        self,
        model: Path,
        tp_size: int,
        *,
        plugin: bool = True,
        in_rank: Callable[[int], None] | None = None,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        **engine: Any,
    ) -> None:
        import_sglang()
        arguments = {
            "model_path": str(model),
            "tp_size": tp_size,
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "max_total_tokens": 4096,
            "max_running_requests": 16,
            "context_length": 2048,
            "skip_tokenizer_init": True,
            "random_seed": 1,
            "log_level": "info",
            **engine,
        }
        fork = multiprocessing.get_context("fork")
        self.log, self.tp_size, self._probes = log, tp_size, 0
        self._pipe, theirs = fork.Pipe()
        self._process = fork.Process(
            target=_serve, args=(theirs, arguments, plugin, in_rank, environment or {}, log), name="engine-host"
        )
        self._process.start()
        assert self._process.pid is not None
        self.session = self._process.pid  # of this engine's processes
        theirs.close()
        self._receive(STARTUP_SECONDS)

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function(engine, ...)`` in the host; its module must be known to both processes."""
        self._pipe.send((function, args, kwargs))
        return self._receive(CALL_SECONDS)

    def generate(self, **kwargs: Any) -> Any:
        return self.call(_generate, **kwargs)

    def set(self, **settings: Any) -> None:
        self.call(_set_shift_parallel, **settings)

    def flush_cache(self) -> None:
        self.call(_flush_cache)

    def info(self) -> dict[str, Any]:
        return self.call(_shift_info)

    def probe(self, folder: Path) -> list[dict[str, Any]]:
        """What each rank's probe (``tests/probes.py``) holds; starts its counters anew."""
        self._probes += 1
        self.call(_probe, self._probes)
        paths = [folder / f"{self._probes}.rank{rank}.pt" for rank in range(self.tp_size)]
        deadline = time.monotonic() + 30  # rank 0 answers for all of them
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, f"no probe of {paths}"
            time.sleep(0.01)
        return [torch.load(path, weights_only=False) for path in paths]

    def close(self) -> None:
        if self._process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(None)
            self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace").splitlines()[-lines:] if self.log else []
        return "\n".join(line[:300] for line in text)

    def _receive(self, seconds: float) -> Any:
        if not self._pipe.poll(seconds):
            self._process.kill()
            raise TimeoutError(f"no answer from the engine in {seconds} s\n{self.tail()}")
        try:
            ok, value = self._pipe.recv()
        except EOFError:
            self._process.join()
            raise HostDied(f"the engine died, exit code {self._process.exitcode}\n{self.tail()}") from None
        if not ok:
            raise value
        return value


def _serve(
    pipe: Any,
    arguments: dict[str, Any],
    plugin: bool,
    in_rank: Callable[[int], None] | None,
    environment: dict[str, str],
    log: Path | None,
) -> None:
    _settle(plugin, environment, log)

    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.managers.scheduler import run_scheduler_process

    def run_rank(server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, *rest: Any, **kwargs: Any) -> None:
        if in_rank is not None:
            in_rank(tp_rank)
        run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *rest, **kwargs)

    class TestEngine(Engine):
        run_scheduler_process_func = staticmethod(run_rank)

    try:
        engine = TestEngine(**arguments)
        pipe.send((True, None))
    except BaseException as error:
        traceback.print_exc()
        pipe.send((False, error if isinstance(error, Exception) else RuntimeError(repr(error))))
        _end()
    while (request := pipe.recv()) is not None:
        function, args, kwargs = request
        try:
            pipe.send((True, function(engine, *args, **kwargs)))
        except Exception as error:
            traceback.print_exc()
            pipe.send((False, error))
    engine.shutdown()
    _end()


def _settle(plugin: bool, environment: dict[str, str], log: Path | None) -> None:
    """Make a fresh fork the first process of an engine or a server."""
    from sglang.srt.utils import kill_itself_when_parent_died

    os.setsid()
    kill_itself_when_parent_died()  # a test run that is killed leaves no engine behind, nor does a host its ranks
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)  # not pytest's
    os.environ.update(environment)
    tempfile.tempdir = None  # TMPDIR may be new
    if not plugin:
        os.environ["SGLANG_PLUGINS"] = "none"
    start_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: start_method("fork", force=True)  # type: ignore


class ForkedServer(Server):
    """A server that starts as quickly: what a user's command runs, in a fork. ``flags`` are the command's.

    The HTTP layer is imported in the fork, not before: the plugin's hooks come first, as in a user's command.
    """

    def __init__(self, flags: list[str], log: Path, *, plugin: bool = True, **environment: str) -> None:
        import_sglang()
        self.prepare(log)
        arguments = [*flags, "--port", str(self.port)]
        process = multiprocessing.get_context("fork").Process(
            target=_run_server, args=(arguments, plugin, environment, log), name="server"
        )
        process.start()
        self.process = _Popen(process)  # type: ignore[assignment]


class _Popen:
    """As much of ``subprocess.Popen`` as :class:`Server` uses."""

    def __init__(self, process: Any) -> None:
        self.forked, self.pid = process, process.pid

    def poll(self) -> int | None:
        return self.forked.exitcode

    def wait(self, seconds: float) -> int:
        self.forked.join(seconds)
        if self.forked.exitcode is None:
            raise subprocess.TimeoutExpired("server", seconds)
        return self.forked.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run_server(arguments: list[str], plugin: bool, environment: dict[str, str], log: Path) -> None:
    _settle(plugin, environment, log)
    if plugin:
        from sgl_shift.launch_server import main

        sys.exit(main(arguments))
    import runpy

    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__")


def _end() -> None:
    from sglang.srt.utils import kill_process_tree

    sys.stdout.flush()
    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(0)


def _generate(engine: Any, **kwargs: Any) -> Any:
    return engine.generate(**kwargs)


def _set_shift_parallel(engine: Any, **settings: Any) -> None:
    engine.set_shift_parallel(**settings)


def _flush_cache(engine: Any) -> None:
    engine.flush_cache()


def _shift_info(engine: Any) -> dict[str, Any]:
    return engine.get_server_info()["internal_states"][0]["shift_parallel"]


def _probe(engine: Any, number: int) -> None:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    request = SetInternalStateReq(server_args={"probe": number})
    assert all(engine.loop.run_until_complete(engine.tokenizer_manager.set_internal_state(request)))
