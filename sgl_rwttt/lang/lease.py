"""Leases: the server closes an owner whose client has died."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from sgl_rwttt.core.errors import InvalidStateRequest, StateError

from .transport import Json

if TYPE_CHECKING:
    from .owner import Owner

AT_ONCE = 1000  # owners or requests that one verb may name
_RETRY_S = 1.0  # after a renewal that did not reach the server


class Lease:
    """Renews the open owners of one backend, in one daemon thread, every third of the lease.

    The thread is there only while owners are open. An owner that the server no longer has gets
    the error that its branches raise at their next use.
    """

    def __init__(self, seconds: float | None, control: Callable[[str, Json], Json]) -> None:
        if seconds is not None and not seconds > 0:
            raise InvalidStateRequest(f"lease_s={seconds}: a positive number of seconds, or None")
        self.seconds = seconds
        self._control = control
        self._owners: weakref.WeakSet[Owner] = weakref.WeakSet()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def arguments(self) -> Json:
        """What `open` is told; without a lease the server's own time-out holds."""
        return {} if self.seconds is None else {"timeout": self.seconds}

    def add(self, owner: Owner) -> None:
        """Renew this owner from now on."""
        if self.seconds is None:
            return
        with self._changed:
            self._owners.add(owner)
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(
                    target=self._serve,
                    args=(self.seconds / 3,),
                    name="sgl_rwttt lease",
                    daemon=True,
                )
                self._thread.start()

    def discard(self, owner: Owner) -> None:
        """Renew it no more: it was closed."""
        with self._changed:
            self._owners.discard(owner)

    def close(self) -> None:
        """Renew nothing any more. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _serve(self, interval: float) -> None:
        pause = interval
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, pause)
                owners = list(self._owners)
                if self._is_closed or not owners:
                    self._thread = None
                    return
            begun = time.monotonic()
            reached = self._renew(owners)
            del owners
            pause = interval if reached else min(interval, _RETRY_S)
            pause = max(0.0, begun + pause - time.monotonic())

    def _renew(self, owners: list[Owner]) -> bool:
        """Whether the server was reached; when it is gone the branches notice by themselves."""
        for first in range(0, len(owners), AT_ONCE):
            named = owners[first : first + AT_ONCE]
            try:
                answer = self._control("renew", {"owners": [owner.name for owner in named]})
            except StateError:
                return False
            unknown = set(answer["unknown"])
            for owner in named:
                owner.renewed(str(answer["boot_id"]), owner.name not in unknown)
        return True
