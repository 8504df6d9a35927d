"""One owner: the session of one run, shared by all its branches."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sgl_rwttt.core.errors import OwnerReleased, ServerGone, StateError, UnknownOwner

from .in_flight import Requests
from .lease import AT_ONCE, Lease
from .ledger import Ledger, Root, Trash
from .transport import Json, Transport

if TYPE_CHECKING:
    from .executor import StateExecutor


TELL_S = 0.5  # how long an end that was forced waits until the server has heard of it


class Owner:
    """A server session, opened at the first need and closed once."""

    def __init__(
        self, transport: Transport, lease: Lease | None = None, rank: int | None = None
    ) -> None:
        """``rank``: of its LoRA deltas, on a server of several; None: the server's default."""
        self.transport = transport
        self.rank = rank
        self.lease = lease if lease is not None else Lease(None, transport.control)
        self.trash = Trash()
        self.executors: weakref.WeakSet[StateExecutor] = weakref.WeakSet()
        self.error: StateError | None = None  # the server has lost this owner
        self.program_thread: threading.Thread | None = None  # of a streamed run
        self._lock = threading.RLock()
        self._users_lock = threading.Lock()
        self._roots: weakref.WeakValueDictionary[str, Root] = weakref.WeakValueDictionary()
        self._clearing = 0  # requests in flight that open a root
        self._roots_lock = threading.Lock()
        self._requests = Requests()
        self._opened: Json | None = None
        self._users = 0
        self.is_closed = False

    @property
    def opened(self) -> Json:
        """The server's answer to /ttt/open; opens the session at the first call."""
        with self._lock:
            if self.is_closed:
                raise OwnerReleased("the owner was released", owner=self.name)
            if self.error is not None:
                raise self.error
            if self._opened is None:
                asked = self.lease.arguments
                if self.rank is not None:
                    asked = {**asked, "rank": self.rank}
                self._opened = self.transport.control("open", asked)
                _live.add(self)
                self.lease.add(self)
            return self._opened

    @property
    def id(self) -> str:
        """Session id on the server."""
        return str(self.opened["owner"])

    @property
    def name(self) -> str | None:
        """Session id, None before it is opened; never raises."""
        return None if self._opened is None else str(self._opened["owner"])

    def new_ledger(self) -> Ledger:
        """An empty context at the model's default root."""
        opened = self.opened
        root = bytes.fromhex(opened["root"])
        return Ledger(root, int(opened["chunk"]), int(opened.get("version", 0)))

    def sweep(self) -> None:
        """Free on the server what nobody refers to any more."""
        self.abort()
        if not self.trash or self._opened is None or self.is_closed:
            return
        rids, pins = self.trash.take()
        for op, key, names in (("drop", "rid", rids), ("unpin", "name", pins)):
            for name in names:
                if not self._forget(op, {"owner": self.name, key: name}):
                    return  # nothing is left there
        self._release_roots()

    @contextmanager
    def asking(self, rids: str | list[str]) -> Iterator[None]:
        """Requests of this thread are in flight; left by anything but an answer, they are ended."""
        with self._requests.asking([rids] if isinstance(rids, str) else rids):
            yield

    def stop(self, thread: threading.Thread) -> None:
        """Have the next `abort` end the requests that `thread` waits for; it makes no others."""
        self._requests.stop(thread)

    def abort(self) -> None:
        """End on the server the requests that were given up, without waiting for their end."""
        rids = self._requests.take()
        if not rids or self._opened is None or self.is_closed:
            return

        def tell() -> None:
            for first in range(0, len(rids), AT_ONCE):
                named = rids[first : first + AT_ONCE]
                self._forget("abort", {"owner": self.name, "rids": named})

        _in_background(tell)

    def _release_roots(self) -> None:
        """Release dead roots, but none that a request in flight may be opening again."""
        with self._roots_lock:
            if self._clearing:
                return
            for root in self.trash.take_roots():
                gone = {"owner": self.name, "root": root}
                if root not in self._roots and not self._forget("release_root", gone):
                    return

    @contextmanager
    def clearing(self) -> Iterator[None]:
        """A request that opens a root is in flight."""
        with self._roots_lock:
            self._clearing += 1
        try:
            yield
        finally:
            with self._roots_lock:
                self._clearing -= 1

    def root(self, root: str) -> Root:
        """The one reference-counted name of a root; call it inside `clearing`."""
        with self._roots_lock:
            found = self._roots.get(root)
            if found is None:
                found = self._roots[root] = Root(root, self.trash)
            return found

    def _forget(self, op: str, args: Json) -> bool:
        """Free something; False when the server is gone, and everything with it."""
        try:
            self.transport.control(op, args)
        except ServerGone:
            return False
        except StateError:  # gone already is what we wanted
            pass
        return True

    def renewed(self, boot: str, is_open: bool) -> None:
        """The server of this boot was asked whether it still has this owner."""
        if self._opened is None or self.is_closed or self.error is not None:
            return
        if boot != self._opened.get("boot_id"):
            self.error = self._restarted(boot)
        elif not is_open:
            self.error = OwnerReleased(
                f"the server has closed this owner: nothing renewed its lease of "
                f"{self.lease.seconds} s in time",
                owner=self.name,
            )

    def _restarted(self, now: Any) -> ServerGone:
        boot = None if self._opened is None else self._opened.get("boot_id")
        return ServerGone(
            f"the server was restarted (boot {boot}, now {now}): its states are gone",
            owner=self.name,
        )

    def explain(self, error: StateError) -> None:
        """Raise ServerGone when `error` comes from a server that was restarted meanwhile."""
        if self._opened is None or not isinstance(error, UnknownOwner):
            return
        now = self.transport.info().get("boot_id")
        if self._opened.get("boot_id") != now:
            raise self._restarted(now) from error

    def join(self, executor: StateExecutor) -> None:
        """Count one more branch of this owner."""
        with self._users_lock:
            self.executors.add(executor)
            self._users += 1

    def leave(self) -> None:
        """Count one branch less; the last one closes the owner."""
        with self._users_lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.close()

    def branches(self) -> list[StateExecutor]:
        """Every branch that somebody still refers to."""
        with self._users_lock:
            return list(self.executors)

    def cancel(self) -> None:
        """End the run from another thread: its branches raise OwnerReleased at once or at their
        next use, its requests are ended on the server, and the owner is closed."""
        for executor in self.branches():
            executor.cancel()
        self.close_at_once()

    def close(self) -> bool:
        """Close the session: every state, pin and root of the owner is freed. Idempotent.

        Its requests in flight are ended. False when the server is gone, and everything with it.
        """
        with self._lock:
            if self.is_closed:
                return True
            self.is_closed = True
            _live.discard(self)
            self.lease.discard(self)
        return self._opened is None or self._forget("close", {"owner": self.name})

    def close_at_once(self) -> None:
        """As `close`, but without waiting for a busy server."""
        _in_background(self.close)


def _in_background(act: Callable[[], object]) -> None:
    """Do it, waiting for at most `TELL_S`: a server that is in a long step answers behind it."""
    thread = threading.Thread(target=act, name="sgl_rwttt cleanup", daemon=True)
    thread.start()
    thread.join(TELL_S)


_live: weakref.WeakSet[Owner] = weakref.WeakSet()


def close_all(transport: Transport) -> None:
    """Close every open owner of `transport` (at exit, or before an in-process server stops)."""
    for owner in [o for o in _live if o.transport is transport]:
        if not owner.close():
            break  # the server is gone, and with it the others
