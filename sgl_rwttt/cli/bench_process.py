"""A script in a process group of its own, of which nothing is left when it is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

TICK_S = 1.0
GRACE_S = 20.0  # for a script that is interrupted, to stop the engines that it started
KILL_S = 5.0  # until what was killed is gone
TIMED_OUT = 124  # exit status, as that of timeout(1)


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that what Ctrl-C cleans up is cleaned up too.

    For the main thread.
    """

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_process(
    command: Sequence[str],
    folder: Path,
    env: dict[str, str],
    outputs: tuple[Path, Path],
    limit_s: float,
    tick: Callable[[float], None],
) -> int:
    """Run a command in `folder` with stdout and stderr in the two files; its exit status.

    `tick` is called about once per second with the seconds passed. After `limit_s`, and when this
    process is interrupted, the command is ended with all that it started.
    """
    start = time.monotonic()
    with outputs[0].open("wb") as out, outputs[1].open("ab") as errors:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        try:
            while time.monotonic() - start < limit_s:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(TICK_S)
                tick(time.monotonic() - start)
            errors.write(f"not done after {limit_s:.0f} s\n".encode())
            return TIMED_OUT
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt it, so that it ends its own workers, then kill what is left below it."""
    below: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    try:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()
        psutil.wait_procs(below, KILL_S)
