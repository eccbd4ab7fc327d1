"""Real servers, started as a user starts them: a command, its environment, its log."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import requests

PYTHON = sys.executable
READY_SECONDS = 300


def free_port() -> int:
    """Below those that the kernel hands out, which SGLang takes while it starts, and so are those that it derives."""
    while True:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port := random.randrange(12_000, 22_000)))
            return port


class Server:
    """A command that serves HTTP; ready when SGLang says that it is."""

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.prepare(log)
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**users_environment(), **environment},
                start_new_session=True,
            )

    def prepare(self, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log

    def wait(self) -> Server:
        deadline = time.monotonic() + READY_SECONDS
        while "The server is fired up" not in self.text():
            code = self.process.poll()
            assert code is None, f"the server ended with {code}\n{self.text()[-4000:]}"
            assert time.monotonic() < deadline, f"not ready in {READY_SECONDS} s\n{self.text()[-4000:]}"
            time.sleep(0.5)
        return self

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def post(self, path: str, body: dict[str, Any], **headers: str) -> requests.Response:
        return requests.post(self.url + path, json=body, headers=headers, timeout=300)

    def chat(self, text: str, max_tokens: int = 24) -> str:
        body = {"model": "demo", "temperature": 0, "max_tokens": max_tokens, "messages": [user(text)]}
        answer = self.post("/v1/chat/completions", body)
        answer.raise_for_status()
        return answer.json()["choices"][0]["message"]["content"]

    def info(self) -> dict[str, Any]:
        return requests.get(self.url + "/server_info", timeout=60).json()["internal_states"][0]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def run(command: list[str], timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """A command that is to end by itself, in a user's environment."""
    env = {**users_environment(), **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def users_environment() -> dict[str, str]:
    """Without what ``tests/hosting.py`` sets for forked engines."""
    ours = ("SGLANG_", "SGL_SHIFT_", "OMP_", "TORCH_COMPILE_DISABLE")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}
