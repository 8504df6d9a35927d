"""One owner: the session of one run, shared by all its branches."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from sgl_rwttt.core.errors import OwnerReleased, ServerGone, StateError, UnknownOwner

from .ledger import Ledger, Root, Trash
from .transport import Json, Transport

if TYPE_CHECKING:
    from .executor import StateExecutor


class Owner:
    """A server session, opened at the first need and closed once."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.trash = Trash()
        self.executors: weakref.WeakSet[StateExecutor] = weakref.WeakSet()
        self.program_thread: threading.Thread | None = None  # of a streamed run
        self._lock = threading.RLock()
        self._roots: weakref.WeakValueDictionary[str, Root] = weakref.WeakValueDictionary()
        self._clearing = 0  # requests in flight that open a root
        self._roots_lock = threading.Lock()
        self._opened: Json | None = None
        self._users = 0
        self.is_closed = False

    @property
    def opened(self) -> Json:
        """The server's answer to /ttt/open; opens the session at the first call."""
        with self._lock:
            if self.is_closed:
                raise OwnerReleased("the owner was released", owner=self.name)
            if self._opened is None:
                self._opened = self.transport.control("open", {})
                _live.add(self)
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
        if not self.trash or self._opened is None or self.is_closed:
            return
        rids, pins = self.trash.take()
        for op, key, names in (("drop", "rid", rids), ("unpin", "name", pins)):
            for name in names:
                self._forget(op, {"owner": self.name, key: name})
        self._release_roots()

    def _release_roots(self) -> None:
        """Release dead roots, but none that a request in flight may be opening again."""
        with self._roots_lock:
            if self._clearing:
                return
            for root in self.trash.take_roots():
                if root not in self._roots:
                    self._forget("release_root", {"owner": self.name, "root": root})

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

    def _forget(self, op: str, args: Json) -> None:
        with suppress(StateError):  # gone already is what we wanted
            self.transport.control(op, args)

    def explain(self, error: StateError) -> None:
        """Raise ServerGone when `error` comes from a server that was restarted meanwhile."""
        if self._opened is None or not isinstance(error, UnknownOwner):
            return
        boot = self._opened.get("boot_id")
        now = self.transport.info().get("boot_id")
        if boot != now:
            raise ServerGone(
                f"the server was restarted (boot {boot}, now {now}): its states are gone",
                owner=self.name,
            ) from error

    def join(self, executor: StateExecutor) -> None:
        """Count one more branch of this owner."""
        with self._lock:
            self.executors.add(executor)
            self._users += 1

    def leave(self) -> None:
        """Count one branch less; the last one closes the owner."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.close()

    def close(self) -> None:
        """Close the session: every state, pin and root of the owner is freed. Idempotent."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            _live.discard(self)
        if self._opened is not None:
            self._forget("close", {"owner": self.name})


_live: weakref.WeakSet[Owner] = weakref.WeakSet()


def close_all(transport: Transport) -> None:
    """Close every open owner of `transport` (at exit, or before an in-process server stops)."""
    for owner in [o for o in _live if o.transport is transport]:
        owner.close()
