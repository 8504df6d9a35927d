"""What is held, counted: each owner's branches, roots, pins and slots, and the sums of a store."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from sgl_rwttt.core.index import StateIndex
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.pins import PinTable
from sgl_rwttt.core.versions import Version


@dataclass(slots=True)
class Holding:
    """One owner's references. A slot that several of them read counts once."""

    running: int = 0  # live branches
    roots: list[bytes] = field(default_factory=list)  # opened by a context reset
    pins: list[str] = field(default_factory=list)  # names, oldest first
    pages: set[int] = field(default_factory=set)  # page slots read, open pages included
    bases: set[int] = field(default_factory=set)  # dense base slots read

    def read(self, version: Version) -> None:
        """Add what reading a version takes."""
        self.pages.update(version.pages)
        if version.base is not None:
            self.bases.add(version.base)


def holdings(
    names: Iterable[str],
    states: Iterable[OwnerState],
    pins: PinTable,
    others: Holding | None = None,
) -> dict[str, Holding]:
    """The holdings of the named owners, in one pass over everything that is held.

    `others`, if given, takes what all other owners hold.
    """
    found = {name: Holding() for name in names}
    for state in states:
        holding = found.get(state.owner, others)
        if holding is not None:
            holding.running += 1
            holding.read(state.version)
            if state.tail is not None:
                holding.pages.add(state.tail.page)
    for owner, name, version, memo in pins.held_by():
        holding = found.get(owner, others)
        if holding is None:
            continue
        holding.read(version)
        if name is None:
            holding.roots.append(version.id)
        else:
            holding.pins.append(name)
        if memo is not None:
            holding.pages.add(memo.tail.page)
    outside = {page for root in pins.defaults.values() for page in root.pages}
    for holding in (*found.values(), others):
        if holding is not None:
            holding.pages -= outside
    return found


def counts(index: StateIndex, pins: PinTable) -> dict[str, int]:
    """Versions, memos, roots, pins and slots of a store."""
    roots, named = pins.counts
    numbers = {
        "versions": len(index.versions),
        "memos": len(index.evictable),
        "tails": index.tails,
        "roots": roots,
        "pins": named,
        "evictions": index.evictions,
        "expirations": index.expirations,
        "pages_version": index.own_pages,
    }
    for pool, name in ((index.pages, "pages"), (index.bases, "bases")):
        numbers[f"{name}_free"] = pool.available
        numbers[f"{name}_live"] = pool.live
        numbers[f"{name}_total"] = pool.total
    return numbers
