"""Versions that leave one store and enter another, with the ledger after every step."""

import random
from functools import partial

import pytest

from sgl_rwttt.core import (
    ForeignOwner,
    IncompatibleSnapshot,
    RollbackBeyondRetention,
    StateCapacity,
    UnknownState,
    Version,
    cleared_root_id,
    faults,
)
from sgl_rwttt.core.snapshots import Chain, Link, chain_of, check_chain

from .fakes import C, Lab, Origin, SlotLab, mixed, replay, writes
from .test_store_walk import SHAPES, Walk


class File:
    """What a snapshot holds: the chain and the payload behind it."""

    def __init__(self, lab: Lab, version: Version) -> None:
        self.chain: Chain = chain_of(version)
        self.base = lab.d[version.base] if version.base is not None else None
        self.pages = [lab.content(page) for page in version.pages]

    def fill(self, lab: Lab):
        """Puts the payload into the slots that a restore took."""

        def fill(base: int | None, pages: tuple[int, ...]) -> None:
            if base is not None:
                lab.d[base] = self.base
            for page, content in zip(pages[::-1], self.pages[::-1], strict=False):
                lab.put(page, content)

        return fill

    def restore(self, lab: Lab, owner: str = "new"):
        restored = lab.store.snapshots.restore(owner, self.chain, self.fill(lab))
        lab.store.check_integrity()
        return restored


def original(lab: Lab, before: int, after: int):
    """A branch that wrote, was cleared and wrote again; its origin and items."""
    items: list = []
    first = lab.create("a", "first")
    lab.append(first, items, mixed(before))
    blocks = tuple(replay(lab.root, items, lab.chunk).blocks)
    root = lab.store.open_root("a", first.version)
    origin, items = Origin(root, first.version.number, blocks), []
    second = lab.create("a", "second", [], origin)
    lab.append(second, items, mixed(after, 100), origin)
    return second, origin, items


@pytest.mark.parametrize("fold_pages", [0, 1, 3])
@pytest.mark.parametrize("before, after", [(0, 0), (3, 9), (23, 0), (40, 40), (5, 61)])
def test_goes_on_in_another_store(fold_pages, before, after):
    """Guards: a state that lacks something of the saved one, or whose ids or numbers restart."""
    old = Lab(pages=60, bases=20, fold_pages=fold_pages)
    state, origin, items = original(old, before, after)
    file = File(old, state.version)
    blocks = tuple(replay(origin, items, C).blocks)
    new = Lab(pages=60, bases=20, fold_pages=fold_pages)
    empty = new.ledger()
    restored = file.restore(new)
    assert not restored.reused
    assert restored.root == old.store.open_root("a", state.version)
    assert restored.version.number == state.version.number
    clear = Origin(restored.root, state.version.number, blocks)
    ours, theirs = new.create("new", "b", [], clear), old.create("a", "b", [], clear)
    for lab, branch in ((new, ours), (old, theirs)):
        new_items: list = []
        for part in (mixed(3), mixed(1), mixed(25, 50)):
            lab.append(branch, new_items, part, clear)
            lab.check(branch, new_items, clear)
            lab.ledger()
    assert ours.clock.state_id == theirs.clock.state_id
    assert ours.version.number == theirs.version.number
    assert len(ours.version.pages) == len(theirs.version.pages)
    new.store.release(ours)
    new.store.release_owner("new")
    new.store.flush()
    assert new.ledger() == empty
    assert new.bases.live == 0


def test_releasing_the_root_frees_the_slots():
    """Guards: restored pages that stay as memos nobody can match; eviction of an open root."""
    old, new = Lab(pages=60), Lab(pages=20)
    state, _, _ = original(old, 20, 21)
    file = File(old, state.version)
    wanted = len(state.version.pages)
    restored = file.restore(new)
    assert restored.pages == wanted == new.pages.live
    assert not new.store.ensure_pages(new.pages.available + 1)
    new.store.flush()
    assert new.ledger()[1] == wanted
    assert file.restore(new, "other").reused
    new.store.close_root("new", restored.root)
    assert new.ledger()[1] == wanted
    new.store.close_root("other", restored.root)
    assert new.ledger()[1] == 0
    with pytest.raises(UnknownState):
        new.store.root("new", restored.root)


def test_retained_versions_are_reused():
    """Guards: a second copy of a state that is there, and a retained ancestor taken twice."""
    lab = Lab(pages=60)
    state, origin, items = original(lab, 8, 20)
    file, live = File(lab, state.version), lab.pages.live
    assert file.restore(lab).reused
    assert lab.pages.live == live
    old = Lab(pages=60)
    longer, _, _ = original(old, 8, 36)
    restored = File(old, longer.version).restore(lab)
    assert not restored.reused
    assert restored.pages == 3
    assert lab.pages.live == live + 3
    lab.store.release_owner("new")
    assert lab.pages.live == live
    lab.check(state, items, origin)


@pytest.mark.parametrize("point", ["publish.allocated", "publish.copied"])
@pytest.mark.parametrize("fold_pages", [0, 2])
def test_failure_before_publication_changes_nothing(point, fold_pages):
    """Guards: a slot that leaks, or a version that is visible before its copy finished."""
    old, new = Lab(pages=60, bases=9, fold_pages=fold_pages), Lab(pages=60, bases=9)
    state, _, _ = original(old, 9, 24)
    file = File(old, state.version)
    new.append(new.create("x", "m"), [], writes(*range(9)))
    before = (new.ledger(), new.bases.live, dict(new.store._index.versions))
    with faults.armed(point, faults.raising(RuntimeError("gone"))), pytest.raises(RuntimeError):
        file.restore(new)
    with pytest.raises(UnknownState):
        new.store.root("new", cleared_root_id(state.version.id))
    assert (new.ledger(), new.bases.live, dict(new.store._index.versions)) == before
    file.restore(new)


def test_what_cannot_fit_is_refused_and_evicts_nothing():
    """Guards: everybody's memos lost for a snapshot that never had a chance."""
    old = Lab(pages=60, bases=9, fold_pages=3)
    state, _, _ = original(old, 0, 26)
    assert state.version.base is not None
    assert state.version.pages
    file = File(old, state.version)
    for new, pool in ((Lab(bases=1), "bases"), (Lab(pages=2, bases=3), "pages")):
        memo = new.create("x", "m")
        new.append(memo, [], writes(1, 2, 3, 4)[: new.pages.total])
        new.store.release(memo)
        before = new.ledger()
        with pytest.raises(StateCapacity, match=f"--{pool}"):
            file.restore(new)
        assert new.ledger() == before


def test_a_full_pool_is_refused():
    """Guards: slots taken from a running owner."""
    old, new = Lab(pages=60), Lab(pages=8)
    state, _, _ = original(old, 0, 25)
    items: list = []
    busy = new.create("x", "m")
    new.append(busy, items, writes(*range(9)))
    with pytest.raises(StateCapacity, match="--pages"):
        File(old, state.version).restore(new)
    new.check(busy, items)


def test_points_that_can_be_saved():
    """Guards: another owner's root in a file, or a version that is no longer there."""
    lab = Lab(pages=60)
    state, origin, _ = original(lab, 9, 9)
    snapshots = lab.store.snapshots
    assert snapshots.cleared("a", origin.id).id == state.version.parent.parent.id
    assert snapshots.cleared("b", lab.root.id).id == lab.root.id
    with pytest.raises(ForeignOwner):
        snapshots.cleared("b", origin.id)
    with pytest.raises(UnknownState):
        snapshots.cleared("a", b"x" * 16)
    assert snapshots.at(state.version.id, "a") is state.version
    gone = state.version.id
    lab.store.release(state)
    lab.store.flush()
    with pytest.raises(RollbackBeyondRetention, match="ttt_pin"):
        snapshots.at(gone, "a")


ROOT = Lab().root.id
V1 = b"1" * 16
BROKEN: dict[str, list[Link]] = {
    "empty": [],
    "another model's root": [Link("root", 0, V1)],
    "root with a number": [Link("root", 3, ROOT)],
    "starts with a page": [Link("page", 1, V1)],
    "negative": [Link("base", -1, V1)],
    "a version left out": [Link("root", 0, ROOT), Link("page", 2, V1)],
    "id twice": [Link("root", 0, ROOT), Link("page", 1, ROOT)],
    "base in the middle": [Link("root", 0, ROOT), Link("base", 1, V1)],
    "clear of another version": [Link("root", 0, ROOT), Link("clear", 0, V1)],
    "rows on top of a slot": [Link("slot", 1, V1), Link("page", 2, b"2" * 16)],
    "slots behind a base": [Link("base", 1, V1), Link("same", 2, b"2" * 16)],
    "a slot in the middle": [Link("root", 0, ROOT), Link("slot", 1, V1)],
    "sharing with a later one": [Link("slot", 2, V1), Link("same", 2, b"2" * 16)],
    "clear that counts": [Link("root", 0, ROOT), Link("clear", 1, cleared_root_id(ROOT))],
}


@pytest.mark.parametrize("links", BROKEN.values(), ids=BROKEN)
def test_impossible_chains_are_refused(links):
    """Guards: a lineage that no owner of this model can have."""
    with pytest.raises(IncompatibleSnapshot, match=r"^chain: "):
        check_chain(links, {ROOT})


def test_one_id_has_one_number():
    """Guards: a file that renumbers a version which others read."""
    lab = Lab()
    state, _, _ = original(lab, 0, 9)
    kept = chain_of(state.version)
    forged = tuple(
        Link("base" if i == 0 else "page", i + 6, link.id) for i, link in enumerate(kept[2:])
    )
    with pytest.raises(IncompatibleSnapshot, match=r"^chain: .*has number"):
        lab.store.snapshots.restore("new", forged, lambda base, pages: None)
    lab.store.check_integrity()


class Exchange(Walk):
    """A random walk that also saves versions, and restores those of all walks."""

    files: list[tuple[File, dict[bytes, tuple]]]

    def verify(self) -> None:
        move = self.random.random()
        if move < 0.04:
            self.save()
        elif move < 0.16:
            self.restore()
        super().verify()

    def save(self) -> None:
        version = self.random.choice(list(self.lab.store._index.versions.values()))
        file = File(self.lab, version)
        self.files.append((file, {link.id: self.expected[link.id] for link in file.chain}))
        del self.files[:-12]

    def restore(self) -> None:
        if not self.files or len(self.origins) > 6:
            return
        (file, blocks), owner = self.random.choice(self.files), self.owner()
        fails = self.random.random() < 0.1
        fault = faults.raising(RuntimeError("gone"))
        try:
            with faults.armed("publish.copied", fault, times=int(fails)):
                restored = file.restore(self.lab, owner)
        except (StateCapacity, RuntimeError):
            self.done["restore refused"] += 1
            return
        self.done["reused" if restored.reused else "restored"] += 1
        self.done["partly"] += 0 < restored.pages < len(file.pages)
        self.expected.update(blocks)
        last = file.chain[-1]
        origin = Origin(restored.root, last.number, blocks[last.id])
        self.expected[restored.root] = origin.blocks
        self.held_roots.setdefault(owner, set()).add(restored.root)
        if all(other.id != origin.id for other in self.origins):
            self.origins.append(origin)
        self.history.append((next(o for o in self.origins if o.id == restored.root), []))


EXCHANGES = [partial(Lab, **shape) for shape in SHAPES[1:]]
EXCHANGES += [partial(SlotLab, pages=9, chunk=2), partial(SlotLab, pages=40, chunk=3)]


@pytest.mark.parametrize("seed", range(len(EXCHANGES)))
def test_two_stores_exchange_versions(seed):
    """Guards: bookkeeping that breaks when restored versions are matched, written on, adopted,
    evicted, expired and released, in any order.

    Seen to fail: without the reference on the retained parent while slots are taken, and with
    the fresh pages left out of what a failing restore gives back.
    """
    walks = [Exchange(10 * seed + i, EXCHANGES[seed]()) for i in range(2)]
    files: list = []
    for walk in walks:
        walk.files = files
    turns = random.Random(seed)
    for _ in range(60):
        turns.choice(walks).run(25)
    done = walks[0].done + walks[1].done
    for walk in walks:
        walk.close()
    assert done["restored"] > 3
    assert done["reused"] > 3
