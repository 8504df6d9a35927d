"""A committed version as a chain of links, which another process can publish again.

A link names one version and what it adds to its parent's reading. The chain of a version runs from
where its reading starts (a default root, or a version with a dense base of its own) to itself;
the payload behind it is that base and one page per "page" link.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, NoReturn

from sgl_rwttt.core.errors import IncompatibleSnapshot, RollbackBeyondRetention, StateCapacity
from sgl_rwttt.core.faults import reach
from sgl_rwttt.core.index import StateIndex
from sgl_rwttt.core.lineage import cleared_root_id
from sgl_rwttt.core.pins import PinTable
from sgl_rwttt.core.slots import SlotPool
from sgl_rwttt.core.versions import Version, sharing

Adds = Literal["root", "base", "page", "slot", "same", "clear"]
_STARTS = ("root", "base", "slot")


class Link(NamedTuple):
    """One version of a chain."""

    adds: Adds
    """What the version has: a default root's nothing, a dense base of its own, a page on top of
    its predecessor's, a page that is all it reads ("slot"), what an older version reads ("same"),
    or what the version reads at which the context was reset ("clear")."""
    number: int
    id: bytes


Chain = tuple[Link, ...]
Fill = Callable[[int | None, tuple[int, ...]], None]


class Restored(NamedTuple):
    """What a restore did."""

    root: bytes  # the opened root
    version: Version
    reused: bool  # the version itself was still retained: nothing was taken or filled
    pages: int  # pages taken and filled


def chain_of(version: Version) -> Chain:
    """The chain of a live version, where its reading starts first."""
    links = []
    at: Version | None = version
    while at is not None:
        links.append(Link(_adds(at), at.number, at.id))
        at = at.parent
    return tuple(reversed(links))


def slots_of(chain: Chain) -> tuple[int, int]:
    """(pages, bases) that the links have of their own."""
    return (
        sum(link.adds in ("page", "slot") for link in chain),
        sum(link.adds == "base" for link in chain),
    )


def check_chain(chain: Sequence[Link], roots: Container[bytes]) -> None:
    """Raise IncompatibleSnapshot("chain: ...") unless the chain could be one of this model's.

    `roots` are the ids of default roots. Ids of blocks are hashes over tokens, which a chain does
    not hold; everything else is checked.
    """
    if not chain:
        _refuse("it is empty")
    if chain[0].adds == "root" and (chain[0].id not in roots or chain[0].number != 0):
        _refuse("it starts at another model's root")
    if chain[0].adds not in _STARTS or chain[0].number < 0:
        _refuse(f"it starts with {chain[0]}")
    kinds = {link.adds for link in chain}
    if kinds & {"base", "page"} and kinds & {"slot", "same"}:
        _refuse("it mixes pages of rows and slots")
    if len({link.id for link in chain}) != len(chain):
        _refuse("an id occurs twice")
    for before, link in pairwise(chain):
        cleared = link.adds == "clear" and link.id == cleared_root_id(before.id)
        if link.adds not in ("page", "same") and not cleared:
            _refuse(f"{link} cannot follow {before}")
        more = link.number - before.number
        if more < 1 if link.adds == "same" else more != (link.adds == "page"):
            _refuse(f"version {link.number} cannot follow version {before.number}")


class SnapshotPath:
    """Export and import of committed versions, for one store."""

    def __init__(self, index: StateIndex, pins: PinTable) -> None:
        self._index = index
        self._pins = pins

    def at(self, version_id: bytes, owner: str) -> Version:
        """The retained version of that id. Raises RollbackBeyondRetention."""
        version = self._index.versions.get(version_id)
        if version is None:
            raise RollbackBeyondRetention(
                "the version at this point is not retained; pin a point (ttt_pin) or clear the "
                "context there (ttt_clear) to keep it",
                owner=owner,
            )
        self._index.touch(version)
        return version

    def cleared(self, owner: str, root: bytes) -> Version:
        """The version that an open root of `owner` was cleared at; a default root is itself.

        Raises UnknownState or ForeignOwner.
        """
        version = self._pins.root(owner, root)
        return version.parent or version

    def restore(self, owner: str, chain: Chain, fill: Fill) -> Restored:
        """Open the root that a context reset at the chain's last version leaves, for `owner`.

        The deepest version of the chain that is still retained is taken as it stands. For the
        rest slots are taken, `fill(base, pages)` puts the payload into them (`base` is None when
        no base is wanted, `pages` are the last ones of the chain, oldest first), and only then
        the versions are published. The root is retained until `close_root` or `release_owner`;
        what was filled for it goes then too, unless somebody else needs it.

        Raises IncompatibleSnapshot for a chain of another model, StateCapacity, and whatever
        `fill` raises; nothing but the memo has changed then.
        """
        check_chain(chain, self._pins.defaults)
        parent, missing = self.deepest(chain)
        if parent is not None:
            self._index.ref(parent)  # not evicted for the slots of its own successors
            self._index.touch(parent)
        last = parent
        try:
            base, pages = self.take(parent, missing, owner, fill) if missing else (None, ())
            last = self.publish(parent, missing, base, pages)
            root = self._pins.open_root(owner, last)
            for link in missing:
                self._index.versions[link.id].expired = True
        finally:
            if parent is not None:
                self._index.unref(parent)
        return Restored(root, last, not missing, len(pages))

    def retains(self, link: Link) -> bool:
        """Whether that version is retained. Raises IncompatibleSnapshot for another number."""
        version = self._index.versions.get(link.id)
        if version is not None and version.number != link.number:
            _refuse(f"version {link.id.hex()} has number {version.number}, not {link.number}")
        return version is not None

    def deepest(self, chain: Chain) -> tuple[Version | None, Chain]:
        """The last version of the chain that is retained, and the links after it."""
        for i in reversed(range(len(chain))):
            if self.retains(chain[i]):
                return self._index.versions[chain[i].id], chain[i + 1 :]
        return None, chain

    def take(
        self, parent: Version | None, missing: Chain, owner: str, fill: Fill, more: int = 0
    ) -> tuple[int | None, tuple[int, ...]]:
        """Filled slots for `missing`, and `more` pages behind theirs; all or none."""
        index = self._index
        wanted, bases = slots_of(missing)
        wanted += more
        self._reserve(wanted, bases, owner)
        base = index.bases.alloc() if bases else None
        pages: list[int] = []
        after = parent.pages[-1] if parent is not None and parent.pages else None
        try:
            for _ in range(wanted):
                after = index.pages.alloc(after)
                pages.append(after)
            reach("publish.allocated", owner=owner)
            fill(base, tuple(pages))
            reach("publish.copied", owner=owner)
        except BaseException:
            for page in pages:
                index.pages.free(page)
            if base is not None:
                index.bases.free(base)
            raise
        return base, tuple(pages)

    def check_fits(self, pages: int, bases: int, owner: str) -> None:
        """Raise StateCapacity for more slots than the pools have."""
        for pool, need in ((self._index.pages, pages), (self._index.bases, bases)):
            if need > pool.total - pool.reserved:
                raise StateCapacity(_lacking(pool, need), owner=owner)

    def _reserve(self, pages: int, bases: int, owner: str) -> None:
        self.check_fits(pages, bases, owner)
        if not self._index.ensure(pages, bases):
            short = self._index.pages.available < pages
            pool, need = (self._index.pages, pages) if short else (self._index.bases, bases)
            raise StateCapacity(_lacking(pool, need), owner=owner)

    def publish(
        self, parent: Version | None, missing: Chain, base: int | None, pages: tuple[int, ...]
    ) -> Version:
        """Index the missing versions with their filled slots; the last one (or the parent)."""
        fresh = iter(pages)
        at = parent
        for link in missing:
            at = _version(link, at, base, fresh)
            self._index.publish(at)
        assert at is not None  # a chain is never empty
        return at


def _version(link: Link, parent: Version | None, base: int | None, fresh: Iterator[int]) -> Version:
    if parent is None and link.adds == "slot":
        page = next(fresh)
        return Version(link.id, link.number, None, page, None, (page,))
    if parent is None:
        return Version(link.id, link.number, base=base, owns_base=True)
    if link.adds == "same":
        return sharing(link.id, link.number, parent)
    if link.adds == "clear":
        return Version(link.id, link.number, parent, None, parent.base, parent.pages)
    page = next(fresh)
    return Version(link.id, link.number, parent, page, parent.base, (*parent.pages, page))


def _adds(version: Version) -> Adds:
    if version.owns_base:
        return "base"
    parent = version.parent
    if version.page is not None:
        return "slot" if parent is None else "page"
    if parent is None:
        return "root"
    return "clear" if version.id == cleared_root_id(parent.id) else "same"


def _refuse(reason: str) -> NoReturn:
    raise IncompatibleSnapshot(f"chain: {reason}")


def _lacking(pool: SlotPool, need: int) -> str:
    hint = f"; raise {pool.flag}" if pool.flag else ""
    return (
        f"the snapshot needs {need} slots of the {pool.name} pool, {pool.available} of "
        f"{pool.total - pool.reserved} can be had{hint}"
    )
