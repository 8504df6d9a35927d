"""What owners keep on purpose: roots opened by a context reset, and named points."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from sgl_rwttt.core.errors import (
    BranchBusy,
    ForeignOwner,
    InvalidStateRequest,
    StaleVersion,
    UnknownState,
    WriteFailed,
)
from sgl_rwttt.core.index import StateIndex
from sgl_rwttt.core.lineage import cleared_root_id
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.versions import TailMemo, Version


@dataclass(frozen=True, slots=True)
class Pin:
    """A retained point; holds one reference on each."""

    version: Version
    memo: TailMemo | None  # None when the point was a boundary


class PinTable:
    """Roots and pins by owner. The default roots belong to everybody and are never closed."""

    def __init__(self, index: StateIndex, defaults: Mapping[bytes, tuple[int, ...]]) -> None:
        """`defaults`: their ids, and the pages outside the pool that reading one takes."""
        self._index = index
        self._defaults = {root: Version(root, 0, pages=at) for root, at in defaults.items()}
        for version in self._defaults.values():
            index.publish(version)
            index.ref(version)
        self._owners_of: dict[bytes, set[str]] = {}
        self._pins: dict[str, dict[str, Pin]] = {}

    # roots

    @property
    def defaults(self) -> Mapping[bytes, Version]:
        """The default roots by id."""
        return self._defaults

    def open_root(self, owner: str, version: Version) -> bytes:
        """Open the root that a context reset at `version` leaves; returns its id.

        The root reads what `version` reads and is retained until `release_owner`. Opening it
        again changes nothing. Raises StaleVersion when `version` was evicted.
        """
        if version.refs < 1:
            raise StaleVersion("the version is no longer retained", owner=owner)
        root = cleared_root_id(version.id)
        owners = self._owners_of.get(root, set())
        if owner in owners:
            return root
        if root not in self._index.versions:
            self._index.publish(
                Version(root, version.number, version, None, version.base, version.pages)
            )
        self._index.renew(self._index.versions[root])
        self._index.ref(self._index.versions[root])
        self._owners_of[root] = owners | {owner}
        return root

    def root(self, owner: str, root: bytes) -> Version:
        """The version of an open root. Raises UnknownState, or ForeignOwner for another's."""
        if root in self._defaults:
            return self._defaults[root]
        if owner not in self.owners_of(root):
            raise ForeignOwner(f"root {root.hex()} belongs to another owner", owner=owner)
        return self._index.versions[root]

    def close_root(self, owner: str, root: bytes) -> None:
        """Give one root of an owner back; branches that run in it go on.

        Raises UnknownState, ForeignOwner, or InvalidStateRequest for a default root.
        """
        self.root(owner, root)
        if root in self._defaults:
            raise InvalidStateRequest("a default root is never closed", owner=owner)
        self._let_go_root(owner, root)

    def owners_of(self, root: bytes) -> set[str]:
        """Owners that hold a root open (none for a default root); raises UnknownState."""
        if root in self._defaults:
            return set()
        if root not in self._owners_of:
            raise UnknownState(f"no open root {root.hex()}")
        return self._owners_of[root]

    def roots_of(self, owner: str) -> list[bytes]:
        """Roots that an owner holds open, oldest first."""
        return [root for root, owners in self._owners_of.items() if owner in owners]

    # pins

    def pin(self, owner: str, name: str, state: OwnerState) -> None:
        """Retain the present point of a branch under a name, replacing an older pin of it.

        The branch may go on writing: the pin keeps the version and the rows of this moment.
        Raises ForeignOwner, BranchBusy while a write is open, WriteFailed for a failed branch.
        """
        if state.owner != owner:
            raise ForeignOwner(f"branch {state.branch} belongs to another owner", owner=owner)
        if state.candidate is not None:
            raise BranchBusy("cannot pin while a write is open", **state.names)
        if state.failed:
            raise WriteFailed("cannot pin a failed branch", **state.names)
        memo = None
        if state.tail is not None:
            memo = self._index.retain(state.version, state.tail, state.clock.rows, state.tail_key)
        self.hold(owner, name, state.version, memo)

    def hold(self, owner: str, name: str, version: Version, memo: TailMemo | None) -> None:
        """Retain a version, and a tail after it, under a name, replacing an older pin of it."""
        if memo is not None:
            self._index.pin_memo(memo)
        self._index.ref(version)
        named = self._pins.setdefault(owner, {})
        old = named.get(name)
        named[name] = Pin(version, memo)
        if old is not None:
            self._let_go(old)

    def unpin(self, owner: str, name: str) -> None:
        """Drop one pin; what it kept becomes an ordinary memo. Raises UnknownState."""
        named = self._pins.get(owner, {})
        if name not in named:
            raise UnknownState(f"owner has no pin {name!r}", owner=owner)
        self._let_go(named.pop(name))
        if not named:
            del self._pins[owner]

    def names(self, owner: str) -> tuple[str, ...]:
        """Names of an owner's pins, oldest first."""
        return tuple(self._pins.get(owner, ()))

    def release_owner(self, owner: str) -> int:
        """Drop every pin and root of an owner; returns how many there were."""
        pins = self._pins.pop(owner, {})
        for pin in pins.values():
            self._let_go(pin)
        roots = self.roots_of(owner)
        for root in roots:
            self._let_go_root(owner, root)
        return len(pins) + len(roots)

    def held(self) -> Iterator[tuple[Version, TailMemo | None]]:
        """Everything held here, once per reference."""
        for version in self._defaults.values():
            yield version, None
        for _, _, version, memo in self.held_by():
            yield version, memo

    def held_by(self) -> Iterator[tuple[str, str | None, Version, TailMemo | None]]:
        """(owner, name, version, tail) of every root (name None) and pin; not of default roots."""
        for root, owners in self._owners_of.items():
            for owner in owners:
                yield owner, None, self._index.versions[root], None
        for owner, named in self._pins.items():
            for name, pin in named.items():
                yield owner, name, pin.version, pin.memo

    @property
    def counts(self) -> tuple[int, int]:
        """(roots without the default ones, pins)."""
        return len(self._owners_of), sum(len(named) for named in self._pins.values())

    def _let_go_root(self, owner: str, root: bytes) -> None:
        version = self._index.versions[root]
        self._owners_of[root].discard(owner)
        if not self._owners_of[root]:
            del self._owners_of[root]
            self._index.expire(version)  # nobody can match a closed root
        self._index.unref(version)

    def _let_go(self, pin: Pin) -> None:
        if pin.memo is not None:
            self._index.unpin_memo(pin.memo)
        self._index.unref(pin.version)
