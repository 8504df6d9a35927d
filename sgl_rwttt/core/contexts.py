"""A point in the middle of a context, which another process can publish again.

Beside the version at the last boundary it has the root of the context, so that what is evicted
later can be computed again, and the open tail. Ids are chained over the tokens, so a point is
checked against its tokens before anything is taken for it.
"""

from collections.abc import Callable, Container
from typing import NamedTuple, NoReturn

from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.errors import IncompatibleSnapshot, RollbackBeyondRetention
from sgl_rwttt.core.index import StateIndex
from sgl_rwttt.core.lineage import tail_key_of
from sgl_rwttt.core.matching import match_chain
from sgl_rwttt.core.pins import PinTable
from sgl_rwttt.core.segment import Evidence
from sgl_rwttt.core.snapshots import (
    Chain,
    Fill,
    SnapshotPath,
    chain_of,
    check_chain,
    slots_of,
)
from sgl_rwttt.core.versions import Match, Tail, TailMemo, Version

FillPoint = Callable[[int | None, tuple[int, ...], int | None], None]


class Point(NamedTuple):
    """A point of a context; check it (`check_point`) before use."""

    root: Chain  # chain of the context's root
    head: Chain  # chain of the version at the last boundary before the point
    context: ContextChain  # the tokens with their modes, at least up to the point
    position: int


class PointState(NamedTuple):
    """The retained state of a point. Valid until the store's next allocation or flush."""

    point: Point
    version: Version
    tail: TailMemo | None
    rows: int  # of the tail


class Missing(NamedTuple):
    """What of a point is not retained."""

    root: Chain  # links of the root's chain
    head: Chain  # links of the head's chain
    tail: bool  # whether the open tail


class Resumed(NamedTuple):
    """What a resume did."""

    version: Version
    pages: int  # pages taken and filled, the tail's included
    tail: bool  # whether the tail was one of them


def extends_root(point: Point) -> bool:
    """Whether the head's reading runs through the context's root (no dense base since)."""
    return point.head[: len(point.root)] == point.root


def check_point(point: Point, roots: Container[bytes]) -> None:
    """Raise IncompatibleSnapshot unless the chains lead from a root to the tokens' last boundary.

    `roots` are the ids of default roots.
    """
    check_chain(point.root, roots)
    check_chain(point.head, roots)
    start, context = point.root[-1], point.context
    if start.adds not in ("root", "clear"):
        _refuse("the context does not start at a root")
    if (start.id, start.number) != (context.root, context.number):
        _refuse("the tokens start at another root")
    passed = [(b.number, b.version_id) for b in context.boundaries(point.position)][1:]
    leads = _slots_lead if {"slot", "same"} & {link.adds for link in point.head} else _pages_lead
    if not leads(point, passed):
        _refuse("it does not lead to the tokens")


def _pages_lead(point: Point, passed: list[tuple[int, bytes]]) -> bool:
    """Every boundary since the root, or since a dense base, has a link."""
    inside = point.head[len(point.root) :] if extends_root(point) else point.head
    whole = extends_root(point) or point.head[0].adds == "base"
    expected = passed if extends_root(point) else passed[max(0, len(passed) - len(inside)) :]
    return whole and [(link.number, link.id) for link in inside] == expected


def _slots_lead(point: Point, passed: list[tuple[int, bytes]]) -> bool:
    """The last boundary has a link, and the one whose page it reads is on the way there."""
    root = [(link.number, link.id) for link in point.root]
    links = [(link.number, link.id) for link in point.head]
    return links[-1] == (passed or root)[-1] and set(links) <= {*passed, *root}


class ContextPath:
    """Export and import of points, for one store."""

    def __init__(
        self,
        index: StateIndex,
        pins: PinTable,
        snapshots: SnapshotPath,
        evidence: Evidence,
    ) -> None:
        self._index = index
        self._pins = pins
        self._snapshots = snapshots
        self._evidence = evidence

    def at(self, owner: str, context: ContextChain, position: int) -> PointState:
        """The state at a position of a context whose root `owner` holds open.

        Raises UnknownState, ForeignOwner, and RollbackBeyondRetention saying how far the state is
        retained.
        """
        start = self._pins.root(owner, context.root)
        match = match_chain(self._index, context, position, self._evidence)
        if match.depth < position:
            raise RollbackBeyondRetention(
                f"of {position} tokens the state is retained up to {match.depth}: consume the "
                "point again, then save",
                owner=owner,
            )
        point = Point(chain_of(start), chain_of(match.version), context, position)
        return PointState(point, match.version, match.tail, match.rows)

    def missing(self, point: Point) -> Missing:
        """What a resume has to fill now."""
        start = self._snapshots.deepest(point.root)[1]
        head = self._snapshots.deepest(point.head)[1]
        if self._evidence == "tokens":
            return Missing(start, head, False)
        if not head:
            return Missing(start, head, self._match(point).depth < point.position)
        return Missing(start, head, point.context.clock_at(point.position).rows > 0)

    def resume(
        self, owner: str, pin: str, point: Point, fill_root: Fill, fill: FillPoint
    ) -> Resumed:
        """Publish a checked point for `owner`, open its root and retain the point under `pin`.

        What is still retained is taken as it stands. For the rest slots are taken and filled
        before anything is visible: `fill_root(base, pages)` as in `SnapshotPath.restore`,
        `fill(base, pages, tail)` with the page of the open tail, or None.

        Raises StateCapacity, IncompatibleSnapshot, and whatever a fill raises; nothing but the
        memo has changed then.
        """
        start, head, tail = self.missing(point)
        known = {link.id for link in start}
        pages, bases = slots_of((*start, *(link for link in head if link.id not in known)))
        self._snapshots.check_fits(pages + tail, bases, owner)
        opens, root = False, point.root[-1].id
        filled = 0
        if root not in self._pins.defaults:
            opens = root not in self._pins.roots_of(owner)
            filled = self._snapshots.restore(owner, point.root[:-1], fill_root).pages
        try:
            resumed = self._resume(owner, pin, point, fill)
        except BaseException:
            if opens:
                self._pins.close_root(owner, root)
            raise
        return resumed._replace(pages=resumed.pages + filled)

    def _resume(self, owner: str, pin: str, point: Point, fill: FillPoint) -> Resumed:
        parent, missing = self._snapshots.deepest(point.head)
        tail = self.missing(point).tail
        if parent is not None:
            self._index.ref(parent)  # not evicted for the slots of its own successors
            self._index.touch(parent)

        def fill_slots(base: int | None, pages: tuple[int, ...]) -> None:
            fill(base, pages[:-1] if tail else pages, pages[-1] if tail else None)

        try:
            base: int | None = None
            pages: tuple[int, ...] = ()
            if missing or tail:
                base, pages = self._snapshots.take(parent, missing, owner, fill_slots, int(tail))
            version = self._snapshots.publish(parent, missing, base, pages)
            memo = self._tail(version, pages[-1], point) if tail else self._retained(point)
            self._pins.hold(owner, pin, version, memo)
        finally:
            if parent is not None:
                self._index.unref(parent)
        return Resumed(version, len(pages), tail)

    def _tail(self, version: Version, page: int, point: Point) -> TailMemo:
        clock = point.context.clock_at(point.position)
        tail = Tail(page, clock.rows)
        memo = self._index.retain(version, tail, clock.rows, tail_key_of(clock.codes))
        self._index.unref_tail(tail)
        return memo

    def _retained(self, point: Point) -> TailMemo | None:
        return self._match(point).tail

    def _match(self, point: Point) -> Match:
        return match_chain(self._index, point.context, point.position, self._evidence)


def _refuse(reason: str) -> NoReturn:
    raise IncompatibleSnapshot(f"chain: {reason}")
