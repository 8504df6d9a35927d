"""The store: owners from open to release, their forks, roots and pins.

Numbers in docstrings are kinds of field failure.
"""

import pytest

from sgl_rwttt.core import (
    BranchBusy,
    ForeignOwner,
    InvalidStateRequest,
    ModeSpans,
    OwnerReleased,
    SlotPool,
    StaleVersion,
    TTTStateStore,
    UnknownState,
    cleared_root_id,
)

from .fakes import C, Lab, Origin, W, mixed, replay, snapshot, state_fields, writes


def test_a_committed_version_never_changes():
    """A late write through an old alias after donation to the cache (6)."""
    lab = Lab(chunk=C)
    state, items = lab.create("a", "x"), []
    lab.append(state, items, writes(*range(C + 2)))
    lab.store.pin("a", "here", state)
    handle, before = state.version, snapshot(lab, state.version)
    rows = lab.tail_rows(state.tail.page, 2)
    held = state.tail
    for i in range(3 * C):
        lab.append(state, items, writes(i))
        lab.check(state, items)
    assert snapshot(lab, handle) == before
    assert lab.tail_rows(held.page, 2) == rows
    lab.store.release(state)
    lab.store.flush()
    pinned = lab.create("a", "again", items, limit=C + 2)
    lab.check(pinned, items[: C + 2])


@pytest.mark.parametrize("point", ["create", "fork", "begin_write"])
def test_a_failed_copy_leaves_no_trace(point):
    """A slot visible before its copy finished (7): index unchanged, slot back."""
    lab = Lab(chunk=C)
    state, items = lab.create("a", "x"), []
    lab.append(state, items, writes(1, 2, 3))
    lab.store.pin("a", "p", state)
    before, stats, ledger = state_fields(state), lab.store.stats(), lab.ledger()
    lab.copy_fails = True
    calls = {
        "create": lambda: lab.create("b", "y", items),
        "fork": lambda: lab.store.fork(state, "b", "y"),
        "begin_write": lambda: lab.begin(state, items, writes(4, 5)),
    }
    with pytest.raises(RuntimeError, match="copy failed"):
        calls[point]()
    assert (state_fields(state), lab.store.stats(), lab.ledger()) == (before, stats, ledger)
    lab.copy_fails = False
    lab.append(state, items, writes(4, 5))
    lab.check(state, items)


@pytest.mark.parametrize("base", range(2 * C))
def test_five_forks_leave_their_base_alone(base):
    """A fork by reference mutates the stored cache (8); children equal cold runs."""
    lab = Lab(pages=64, chunk=C)
    state, items = lab.create("a", "base"), []
    lab.append(state, items, mixed(base))
    version, before = snapshot(lab, state.version), state_fields(state)[2:]
    for child in range(5):
        twin = lab.store.fork(state, f"child {child}", "x")
        own = list(items)
        lab.append(twin, own, mixed(7, 10 * child), split=1 + child)
        lab.check(twin, own)
        cold = Lab(chunk=C)
        lonely, other = cold.create("c", "x"), []
        cold.append(lonely, other, own)
        assert lonely.clock.state_id == twin.clock.state_id
    assert (snapshot(lab, state.version), state_fields(state)[2:]) == (version, before)
    lab.check(state, items)


def test_a_context_reset_forgets_every_field():
    """Reset forgets a field (8): the new context keeps the committed version and nothing else."""
    lab = Lab(chunk=C)
    state, items = lab.create("a", "x"), []
    lab.append(state, items, mixed(2 * C + 3))
    root = lab.store.open_root("a", state.version)
    assert root == cleared_root_id(state.version.id)
    blocks = tuple(replay(lab.root, items, C).blocks)
    origin = Origin(root, state.version.number, blocks)
    fresh = lab.create("a", "y", items, origin)
    assert (fresh.clock.position, fresh.clock.rows, fresh.clock.items, fresh.tail) == (
        0,
        0,
        (),
        None,
    )
    assert fresh.clock.state_id == root and fresh.version.number == state.version.number
    own: list = []
    lab.append(fresh, own, mixed(C + 2), origin)
    lab.check(fresh, own, origin)
    assert lab.store.release_owner("a") == 1
    lab.store.check_integrity()
    lab.check(fresh, own, origin)
    with pytest.raises(UnknownState):
        lab.match(origin, own)


POINTS = [
    "matched",
    "allocated",
    "mid-prefill",
    "mid-tail",
    "before commit",
    "after commit",
    "pinned",
]


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("keep_tail", [True, False])
def test_abort_at_every_point_leaves_the_ledger_balanced(point, keep_tail):
    """Abort between prefix match and allocation leaks the slot (9)."""
    lab = Lab(pages=16, chunk=C)
    prompt = writes(*range(C + 2))
    seed, items = lab.create("seed", "x"), []
    lab.append(seed, items, prompt)
    lab.store.release(seed)
    start = None
    for turn in range(40):
        lab.match(lab.root, prompt)
        if point != "matched":
            state = lab.create("a", "x", prompt)
            items = prompt[: state.clock.position]
            if point == "mid-prefill":
                lab.begin(state, items, mixed(2 * C))
            if point == "mid-tail":
                lab.append(state, items, writes(turn))
            if point == "before commit":
                candidate = lab.begin(state, items, writes(1, 2, 3))
                lab.run(candidate, lab.root, items + writes(1, 2, 3))
            if point in ("after commit", "pinned"):
                lab.append(state, items, writes(1, 2, 3))
            if point == "pinned":
                lab.store.pin("a", "p", state)
            lab.store.release(state, keep_tail)
            lab.store.release_owner("a")
        lab.ledger()
        lab.store.ensure_pages(10)
        if turn == 20:
            lab.store.flush()
            start = lab.ledger()
    lab.store.flush()
    assert lab.ledger() == start == (15, 0, 1)


def test_open_append_close_ten_times_the_pool():
    """Closing never frees (10); a second release raises and changes nothing."""
    lab = Lab(pages=6, bases=2, chunk=C, fold_pages=2)
    for turn in range(60):
        state, items = lab.create(f"owner {turn}", "x"), []
        lab.append(state, items, mixed(2 * C + 1, turn))
        lab.check(state, items)
        lab.store.release(state)
        ledger = lab.ledger()
        for late in (
            lambda state=state: lab.store.release(state),
            lambda state=state: lab.store.view(state),
            lambda state=state: lab.store.begin_write(state, [1], W, 0),
        ):
            with pytest.raises(OwnerReleased):
                late()
        assert lab.ledger() == ledger


def test_a_late_write_of_a_released_owner_is_refused():
    """A finished request's late write lands in a slot that somebody else got (11)."""
    lab = Lab(pages=3, chunk=C)
    state = lab.create("a", "x")
    candidate = lab.begin(state, [], writes(*range(C)))
    page = candidate.blocks[0].page
    lab.store.release(state)
    heir, items = lab.create("b", "y"), []
    lab.append(heir, items, writes(7, 8))
    assert heir.tail.page == page and not candidate.is_open
    before = lab.ledger()
    with pytest.raises(StaleVersion):
        candidate.mark_written(page)
    with pytest.raises(OwnerReleased):
        lab.store.commit(candidate)
    lab.store.drop(candidate)
    assert lab.ledger() == before
    lab.check(heir, items)


@pytest.mark.parametrize("case", ["root", "foreign root", "pin", "foreign pin", "branch twice"])
def test_unknown_foreign_and_duplicate_names_raise(case):
    """An unknown name silently means the base model (15)."""
    lab = Lab(chunk=C)
    state, items = lab.create("a", "x"), []
    lab.append(state, items, writes(*range(C)))
    root = lab.store.open_root("a", state.version)
    stats, ledger = lab.store.stats(), lab.ledger()
    calls = {
        "root": (UnknownState, lambda: lab.match(Origin(b"?" * 16), items)),
        "foreign root": (ForeignOwner, lambda: lab.store.root("b", root)),
        "pin": (UnknownState, lambda: lab.store.unpin("a", "nothing")),
        "foreign pin": (ForeignOwner, lambda: lab.store.pin("b", "p", state)),
        "branch twice": (BranchBusy, lambda: lab.create("a", "x", items)),
    }
    error, call = calls[case]
    with pytest.raises(error):
        call()
    assert (lab.store.stats(), lab.ledger()) == (stats, ledger)
    assert lab.store.root("a", root).id == root
    assert lab.store.root("b", lab.root.id).id == lab.root.id
    with pytest.raises(UnknownState):
        lab.store.root("a", b"?" * 16)


def test_pins_replace_survive_pressure_and_end_with_their_owner():
    """A pin that is evicted, or one that outlives its owner."""
    lab = Lab(pages=8, chunk=C)
    state, items = lab.create("a", "x"), []
    lab.append(state, items, writes(*range(C + 1)))
    lab.store.pin("a", "p", state)
    lab.append(state, items, writes(5))
    lab.store.pin("a", "p", state)
    lab.store.pin("a", "q", state)
    assert lab.store.pin_names("a") == ("p", "q")
    lab.store.release(state)
    lab.store.flush()
    assert not lab.store.ensure_pages(8)
    assert lab.match(lab.root, items).depth == C + 2
    lab.store.unpin("a", "p")
    lab.store.flush()
    assert lab.match(lab.root, items).depth == C + 2
    assert lab.store.release_owner("a") == 1 and lab.store.release_owner("a") == 0
    lab.store.flush()
    assert lab.ledger()[1] == 0


def test_a_root_is_closed_once_and_by_its_owner():
    """A cleared context that nobody names any more pins its pages for good."""
    lab = Lab(chunk=C)
    state, items = lab.create("a", "x"), []
    lab.append(state, items, writes(*range(C)))
    root = lab.store.open_root("a", state.version)
    assert lab.store.open_root("b", state.version) == root
    lab.store.release(state)
    with pytest.raises(ForeignOwner):
        lab.store.close_root("c", root)
    with pytest.raises(InvalidStateRequest):
        lab.store.close_root("a", lab.root.id)
    lab.store.close_root("a", root)
    with pytest.raises(ForeignOwner):
        lab.store.close_root("a", root)
    lab.store.flush()
    assert lab.store.root("b", root).pages == state.version.pages
    lab.store.close_root("b", root)
    with pytest.raises(UnknownState):
        lab.store.close_root("b", root)
    lab.store.flush()
    assert lab.ledger()[1] == 0


def test_several_default_roots():
    """Owners of one kind that start from the other's state, or whose start is evicted or counted
    as theirs.
    """
    first, second = b"1" * 16, b"2" * 16
    pages, bases = SlotPool(6, "pages"), SlotPool(1, "bases")
    store = TTTStateStore(pages, bases, C, 0, first, no_copy, "tokens", {second: (6,)})
    for root, reads in ((first, ()), (second, (6,))):
        version = store.root("anybody", root)
        assert (version.number, version.pages) == (0, reads)
        match = store.match(root, [], ModeSpans(), 0)
        state = store.create("a", root.hex(), match, root, [], ModeSpans())
        assert store.view(state).pages == reads
        candidate = store.begin_write(state, list(range(2 * C)), W, 0)
        assert next(part.pages for part in candidate.segment.parts) == reads
        kept, learnt = (block.page for block in candidate.blocks)
        candidate.mark_written(kept, changed=False)
        candidate.mark_written(learnt)
        (shares, own) = store.commit(candidate)
        assert (shares.pages, own.pages) == (reads, (learnt,))
        store.pin("a", root.hex(), state)
        store.release(state)
        with pytest.raises(InvalidStateRequest, match="a default root is never closed"):
            store.close_root("a", root)
        store.check_integrity()
    cleared = store.open_root("a", store.root("a", second))
    assert store.root("a", cleared).pages == (6,)
    assert store.holdings(["a"])["a"].pages < set(range(6)), "the start is outside the pool"
    store.release_owner("a")
    store.flush()
    store.check_integrity()
    assert (pages.live, store.stats()["versions"]) == (0, 2)


def no_copy(source: int, target: int, rows: int) -> None:
    raise AssertionError("there is nothing to copy")
