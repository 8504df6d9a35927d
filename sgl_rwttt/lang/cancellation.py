"""Runs that somebody else may end: a cancelled task, another row that failed, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from sgl_rwttt.core.errors import OwnerReleased

from .owner import TELL_S, Owner


class Cancellation:
    """The handle by which one run of a program is cancelled from outside, at any moment of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: Owner | None = None
        self._is_cancelled = False

    def begin(self, owner: Owner) -> None:
        """The run begins, on this owner. Raises OwnerReleased when it was cancelled before."""
        with self._lock:
            self._owner = owner
            if self._is_cancelled:
                raise OwnerReleased("the run was cancelled before it began")

    def cancel(self) -> threading.Thread | None:
        """End the run; the thread that does it, since a server may be slow to answer.

        The program stops at its next use of `s`. None when it has not begun: it never will.
        """
        with self._lock:
            self._is_cancelled = True
            if self._owner is None:
                return None
        thread = threading.Thread(target=self._owner.cancel, name="sgl_rwttt cancel", daemon=True)
        thread.start()
        return thread


def in_thread(work: Callable[[], Any]) -> asyncio.Future[Any]:
    """A future of the running event loop for `work`, which runs in a daemon thread of its own.

    No pool has to have a free thread, and neither the loop nor the process waits for it at its end.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, StopIteration):  # a future cannot hold one
            future.set_exception(RuntimeError(f"the program raised {error!r}"))
        else:
            future.set_exception(error)

    def target() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(target,), name="sgl_rwttt arun", daemon=True).start()
    return future


def run_rows(
    rows: Sequence[Any],
    run: Callable[[Any, Cancellation], Any],
    threads: int,
    stops: Callable[[BaseException], bool],
    progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> list[Any]:
    """`run` every row, in at most `threads` threads; results, or what was raised, in order.

    When `stops` says so of an error, and when this call is interrupted, no further row begins and
    those that run are cancelled; such an error, the first in order, is raised. Rows that ignore
    their cancellation are not waited for.
    """
    todo = deque(enumerate(rows))
    handles = [Cancellation() for _ in rows]
    done: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()

    def serve() -> None:
        with suppress(IndexError):  # nothing is left to do
            while True:
                index, row = todo.popleft()
                try:
                    done.put((index, run(row, handles[index]), None))
                except BaseException as error:
                    if stops(error):
                        todo.clear()
                    done.put((index, None, error))

    results: list[Any] = [None] * len(rows)
    running, errors = set(range(len(rows))), {}
    try:
        for _ in range(max(1, min(threads, len(rows)))):
            context = contextvars.copy_context()
            threading.Thread(
                target=context.run, args=(serve,), name="sgl_rwttt row", daemon=True
            ).start()
        for _ in progress(range(len(rows))):
            index, results[index], error = done.get()
            running.discard(index)
            if error is not None:
                results[index] = error
                if stops(error):
                    errors[index] = error
                    break
    finally:
        todo.clear()
        _cancel_all([handles[index] for index in running])
    if errors:
        raise errors[min(errors)]
    return results


def _cancel_all(handles: Iterable[Cancellation]) -> None:
    deadline = time.monotonic() + TELL_S
    for thread in [handle.cancel() for handle in handles]:
        if thread is not None:
            thread.join(max(0.0, deadline - time.monotonic()))
