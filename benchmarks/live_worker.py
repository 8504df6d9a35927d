"""Worker processes that stay alive and are asked in turn; whoever is not asked is stopped.

A worker is a script that `serve`s: it reads questions as JSON lines from its standard input and
writes answers as JSON lines to a pipe of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from common import LOG_TAIL, WorkerFailed

from sgl_rwttt.srt_ext.launch import fresh_environment

PIPE_BYTES = 65536
END_S = 10.0  # that a process which closed its pipe has to end
PR_SET_PDEATHSIG = 1  # of prctl(2): the signal that a process gets when its parent ends


class LiveWorker:
    """`python script JOB.json`, in a session of its own; the job comes first, then questions."""

    def __init__(self, script: Path, job: dict[str, Any], env: dict[str, str], wait_s: float):
        """Start it and wait until it is ready; WorkerFailed after `wait_s` seconds."""
        self.script, self.wait_s = script, wait_s
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.answers, write_end = os.pipe()
        self.buffer = b""
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(write_end)],
            stdin=subprocess.PIPE,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env={**fresh_environment(), **env},
            pass_fds=[write_end],
            start_new_session=True,
        )
        os.close(write_end)
        try:
            self.ask(job)
        except BaseException:
            self.close()
            raise

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer; the worker runs meanwhile, and is stopped before and after.

        Raises WorkerFailed, with the end of its log, when it ends or takes too long.
        """
        self._signal(signal.SIGCONT)
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
            self.process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line())
        except BrokenPipeError:
            raise self._ended() from None
        self._signal(signal.SIGSTOP)
        return answer

    def _line(self) -> bytes:
        deadline = time.monotonic() + self.wait_s
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.answers], [], [], left)[0]:
                raise self._failure(f"gave no answer in {self.wait_s:.0f} s")
            part = os.read(self.answers, PIPE_BYTES)
            if not part:
                raise self._ended()
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def _ended(self) -> WorkerFailed:
        """Its pipe closes before it has written why it ends."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        return self._failure("ended")

    def _failure(self, what: str) -> WorkerFailed:
        self.log.seek(0)
        return WorkerFailed(f"{self.script.name} {what}:\n{self.log.read()[-LOG_TAIL:]}")

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        """Kill the worker and all that it started. Idempotent."""
        if not self.log.closed:
            self._signal(signal.SIGKILL)
            self.process.wait()
            assert self.process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
            os.close(self.answers)
            self.log.close()

    def __enter__(self) -> LiveWorker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def serve(start: Callable[[dict[str, Any]], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """The worker's side: `start` makes of the job what answers the questions, until input ends.

    A process whose parent is killed while it is stopped would stay for ever, so it dies with it.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with os.fdopen(int(sys.argv[1]), "w", encoding="utf-8") as answers:

        def say(answer: dict[str, Any]) -> None:
            answers.write(json.dumps(answer) + "\n")
            answers.flush()

        answer = start(json.loads(sys.stdin.readline()))
        say({})
        for line in sys.stdin:
            say(answer(json.loads(line)))
