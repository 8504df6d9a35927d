"""Which requests are in flight, and which of them nobody waits for any more."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from sgl_rwttt.core.errors import OwnerReleased, StateError


class Requests:
    """Requests in flight by the thread that waits for them, and those that were given up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asking: dict[threading.Thread, list[str]] = {}
        self._stopped: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._given_up: list[str] = []

    @contextmanager
    def asking(self, rids: list[str]) -> Iterator[None]:
        """The calling thread waits for the answers of `rids`; OwnerReleased once it was stopped."""
        thread = threading.current_thread()
        with self._lock:
            if thread in self._stopped:
                raise OwnerReleased("the branch was cancelled")
            self._asking[thread] = rids
        try:
            yield
        except StateError:
            raise
        except BaseException:  # Ctrl-C, or nobody reads the rest of a stream
            with self._lock:
                self._given_up += rids
            raise
        finally:
            with self._lock:
                self._asking.pop(thread, None)

    def stop(self, thread: threading.Thread) -> None:
        """Nobody waits for the requests of this thread any more, and it makes no others."""
        with self._lock:
            self._stopped.add(thread)
            self._given_up += self._asking.get(thread, ())

    def take(self) -> list[str]:
        """The requests that were given up since the last time."""
        with self._lock:
            taken, self._given_up = self._given_up, []
            return taken
