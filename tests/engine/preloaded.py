"""Engine processes forked from one that has SGLang imported: most of a start's time is imports.

For engines of this process. Servers, and those engines whose start, signals or end is tested, are
started as users start them, by SGLang's own spawn.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any, ClassVar

import pytest

from sgl_rwttt.srt_ext.options import ENV_MODELS

# Where the two processes begin. A spawned one imports these too before it loads the plugin.
IMPORTED = ["sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager"]
READ_LATER = {ENV_MODELS, "SGLANG_RUN_ID"}  # by what the processes import themselves
SERVER: Any = forkserver._forkserver  # type: ignore[attr-defined]


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Inside, ``sglang.Engine`` forks its processes, and its shutdown leaves the fork server alone.

    For the start and for the shutdown, each in a block of its own. One engine at a time: SGLang's
    watchdog ends this process when the shutdown of another engine ended what it watches.
    """
    from sglang.srt.entrypoints import engine

    spare = functools.partial(engine.kill_process_tree, skip_pid=SERVER._forkserver_pid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "mp", _Multiprocessing())
        patch.setattr(engine, "kill_process_tree", spare)
        yield


class _Multiprocessing:
    """The module as SGLang's engine uses it, with another way to start a process."""

    def __init__(self) -> None:
        self._others = [p for p in multiprocessing.active_children() if isinstance(p, _Process)]

    def Process(self, **options: Any) -> _Process:
        for process in self._others:
            process.join(1)  # that it ended may be known a moment later
            assert not process.is_alive(), "another engine runs: ending one ends all processes"
        return _Process(**options)

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing, name)


class _Process(ForkServerProcess):
    """Has the environment that this process has now, as a spawned one would."""

    began: ClassVar[dict[str, str]] = {}  # what the fork server's imports could read

    def start(self) -> None:
        self._args = (dict(os.environ), self._target, self._args)
        self._target = _begin
        now = {k: v for k, v in os.environ.items() if k.startswith("SGLANG_")}
        for name in READ_LATER:
            now.pop(name, None)
        if SERVER._forkserver_pid is not None and (not _is_alive() or now != self.began):
            _leave()
        forkserver.set_forkserver_preload(IMPORTED)
        _Process.began = now
        super().start()


def _begin(
    environment: dict[str, str], target: Callable[..., None], args: tuple[Any, ...], **kwargs: Any
) -> None:
    early = {"sgl_rwttt.srt_ext.plugin", "sglang.srt.models.registry"} & sys.modules.keys()
    assert not early, f"imported with another test's environment: {early}"
    os.environ.clear()
    os.environ.update(environment)
    target(*args, **kwargs)


def _is_alive() -> bool:
    """``rw.Engine`` ends, and waits for, every child of this process; then there is none."""
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(SERVER._forkserver_pid, os.WNOHANG)[0] == 0
    return False


def _leave() -> None:
    """Let the next start have a fork server of its own; this one ends with its last process."""
    os.close(SERVER._forkserver_alive_fd)
    SERVER._forkserver_address = SERVER._forkserver_alive_fd = SERVER._forkserver_pid = None
