"""What a server or an engine holds of the machine: its processes, and what they have open. Linux only, like SGLang.

Each is started in a session of its own (``tests/hosting.py``, ``tests/servers.py``), which its processes cannot lose by
the death of a parent: an orphan is still found.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Footprint:
    rss: dict[str, int]  # bytes, by "name#n"; ranks are named after their number
    threads: int
    descriptors: int
    shared_bytes: int  # shared memory that is mapped, named or not
    shared_files: int  # named, in /dev/shm

    @property
    def processes(self) -> int:
        return len(self.rss)

    @property
    def rss_bytes(self) -> int:
        return sum(self.rss.values())


def alive(session: int) -> list[psutil.Process]:
    """Processes of the session, oldest first; those that ended and were not waited for are none."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess, PermissionError):
            if os.getsid(pid) == session:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return found


def wait_until_gone(session: int, seconds: float) -> list[str]:
    """The processes that are still there after so long."""
    deadline = time.monotonic() + seconds
    while (left := alive(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [" ".join(process.cmdline())[:80] for process in left]


def shared_files(session: int) -> set[Path]:
    """Files in /dev/shm that the session's processes have mapped or open, and that still have a name."""
    files = set()
    for process in alive(session):
        proc = Path("/proc") / str(process.pid)
        with contextlib.suppress(OSError):
            files |= set(re.findall(r"/dev/shm/\S+(?=\n)", (proc / "maps").read_text()))
            files |= {os.readlink(descriptor) for descriptor in (proc / "fd").iterdir()}
        # Named after their maker: not those of another number that begins alike, nor of an earlier bearer of this one.
        named = re.compile(rf".*_{process.pid}(_|$)")
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            born = process.create_time() - 1
            files |= {str(file) for file in SHARED.iterdir() if named.match(file.name) and file.stat().st_mtime > born}
    return {Path(file) for file in files if file.startswith(f"{SHARED}/") and Path(file).exists()}


def footprint(session: int) -> Footprint:
    rss: dict[str, int] = {}
    threads = descriptors = shared = 0
    for process in alive(session):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline()) or process.name()
            match = re.search(r"sglang::(\S+)|multiprocessing\.(resource_tracker)", title)
            name = next(filter(None, match.groups())) if match else "main"
            rss[f"{name}#{sum(key.startswith(name) for key in rss)}"] = process.memory_info().rss
            threads += process.num_threads()
            descriptors += process.num_fds()
            status = Path(f"/proc/{process.pid}/status").read_text()
            shared += int(re.search(r"RssShmem:\s+(\d+) kB", status).group(1)) * 1024  # type: ignore[union-attr]
    return Footprint(rss, threads, descriptors, shared, len(shared_files(session)))
