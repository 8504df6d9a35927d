"""A real HTTP server under test, started as a user would start it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from sgl_rwttt.srt_ext.launch import fresh_environment

START_TIMEOUT_S = 240


def free_port() -> int:
    """A port of the loopback interface that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server process on 127.0.0.1; stopped by its own process group."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**fresh_environment(), **(env or {})},
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until /health answers; raises with the log's end when the process ends before."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended:\n{self.tail()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.3)
        raise TimeoutError(f"no /health after {START_TIMEOUT_S} s:\n{self.tail()}")

    def tail(self, size: int = 6000) -> str:
        return self.log.read_text(errors="replace")[-size:]

    def post(self, path: str, json: Any = None, **kwargs: Any) -> requests.Response:
        return requests.post(f"{self.url}{path}", json=json, timeout=120, **kwargs)

    def get(self, path: str, **kwargs: Any) -> requests.Response:
        return requests.get(f"{self.url}{path}", timeout=120, **kwargs)

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)


@contextlib.contextmanager
def serving(command: list[str], log: Path, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A running server; stopped on exit."""
    server = Server(command, log, env)
    try:
        server.wait()
        yield server
    finally:
        server.stop()


def cli(*arguments: str) -> list[str]:
    """The sgl-rwttt command of this environment."""
    return [sys.executable, "-m", "sgl_rwttt.cli.main", *arguments]
