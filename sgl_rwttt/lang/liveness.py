"""A watch over calls that wait: a server that is frozen or cut off is told from a busy one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

SILENCE_S = 5.0  # how long a call hears nothing before the server is asked for a sign of life
PROBE_S = 5.0  # how long the server may take to give one
PROBES = 3  # how many in a row must fail

_current = threading.local()


class Call:
    """One request that waits for its answer."""

    def __init__(self) -> None:
        self.heard = time.monotonic()
        self.sock: socket.socket | None = None  # once the request is sent
        self.verdict: str | None = None  # why the watch ended it

    def hear(self) -> None:
        """Something came."""
        self.heard = time.monotonic()

    def end(self, verdict: str) -> None:
        """Have the waiting thread's read fail."""
        self.verdict = verdict
        if self.sock is not None:
            with suppress(OSError):
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class Watch:
    """Ends calls whose server gives no sign of life, from a daemon thread that lives with them.

    A closed connection ends a call by itself. This is for the rest: a stopped process, a lost
    network. `probe` must raise unless the server answers within `PROBE_S`; a server that computes
    for long does, because another process of it answers. Once a server was found dead, the next
    calls are judged by one probe, at once.
    """

    def __init__(self, probe: Callable[[], Any]) -> None:
        self._probe = probe
        self._changed = threading.Condition()
        self._calls: set[Call] = set()
        self._thread: threading.Thread | None = None
        self._was_lost = False

    @contextmanager
    def call(self) -> Iterator[Call]:
        """A call that the calling thread makes and waits for."""
        call, outer = Call(), getattr(_current, "call", None)
        with self._changed:
            self._calls.add(call)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="sgl_rwttt watch", daemon=True
                )
                self._thread.start()
            elif self._was_lost:
                self._changed.notify_all()
        _current.call = call
        try:
            yield call
            self._was_lost = False
        finally:
            _current.call = outer
            with self._changed:
                self._calls.discard(call)

    def _serve(self) -> None:
        failures = 0
        while True:
            with self._changed:
                if not failures:
                    self._changed.wait_for(lambda: self._was_lost and self._calls, SILENCE_S / 2)
                if not self._calls:
                    self._thread = None
                    return
                since = time.monotonic() - (0.0 if self._was_lost else SILENCE_S)
                silent = [call for call in self._calls if call.heard <= since]
            error = self._ask() if silent else None
            failures = failures + 1 if error is not None else 0
            if error is None:
                for call in silent:
                    call.hear()
                self._was_lost = False
            elif self._was_lost or failures >= PROBES:
                self._end(silent, f"it gave no sign of life: {error}")
                failures = 0

    def _ask(self) -> BaseException | None:
        try:
            self._probe()
        except Exception as error:
            return error
        return None

    def _end(self, silent: list[Call], verdict: str) -> None:
        with self._changed:
            self._was_lost = True
            for call in silent:
                if call in self._calls:
                    self._calls.discard(call)
                    call.end(verdict)


def watched(connection: Any) -> type[Any]:
    """The urllib3 connection class, whose calls show the watch the socket that they wait for."""

    class Watched(connection):
        def getresponse(self) -> Any:
            call = getattr(_current, "call", None)
            if call is not None:
                call.sock = self.sock
            return super().getresponse()

    return Watched


def watched_adapter(**options: Any) -> Any:
    """An adapter of requests whose connections are `watched`."""
    from requests.adapters import HTTPAdapter
    from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

    class Adapter(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
            super().init_poolmanager(*args, **kwargs)
            self.poolmanager.pool_classes_by_scheme = {
                scheme: type(pool.__name__, (pool,), {"ConnectionCls": watched(pool.ConnectionCls)})
                for scheme, pool in (("http", HTTPConnectionPool), ("https", HTTPSConnectionPool))
            }

    return Adapter(**options)
