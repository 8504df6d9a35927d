"""The store: planning, committing and dropping writes.

Numbers in docstrings are kinds of field failure.
"""

import pytest

from sgl_rwttt.core import (
    Effect,
    InvalidStateRequest,
    ModeSpans,
    SlotError,
    StaleVersion,
    WriteFailed,
)
from sgl_rwttt.core.segment import DUMMY

from .fakes import LENGTHS, C, Lab, W, mixed, reads, state_fields, writes


@pytest.mark.parametrize("prefix", LENGTHS)
@pytest.mark.parametrize("n", [x for x in LENGTHS if x])
@pytest.mark.parametrize("fold", [0, 1, 2])
def test_any_length_after_any_cached_prefix(prefix, n, fold):
    """Tails of length 1 and prefix hits at odd lengths take an untested path (2, 3)."""
    lab = Lab(chunk=C, fold_pages=fold)
    first, items = lab.create("a", "first"), []
    if prefix:
        lab.append(first, items, mixed(prefix))
    lab.store.release(first)
    state = lab.create("a", "second", items)
    assert state.clock.position == prefix
    lab.append(state, items, mixed(n, 100))
    lab.check(state, items)
    lab.store.check_integrity()


@pytest.mark.parametrize("cut", range(3 * C + 2))
@pytest.mark.parametrize("step", [None, 1, 3, C - 1, C, C + 1])
def test_any_cut_of_a_prefill_gives_the_same_state(cut, step):
    """Chunked prefill that differs from one-shot (3, 4): same ids, versions and values."""
    prompt = mixed(3 * C + 1)
    whole, parts = Lab(chunk=C), Lab(chunk=C)
    alone, items = whole.create("a", "x"), []
    whole.append(alone, items, prompt)
    state, got = parts.create("a", "x"), []
    for piece in (prompt[:cut], prompt[cut:]):
        parts.append(state, got, piece, split=step)
    parts.check(state, got)
    assert parts.store.view(state).state_id == whole.store.view(alone).state_id
    assert state.version.id == alone.version.id and state.version.number == alone.version.number


@pytest.mark.parametrize("block", ["deferred", "inside"])
def test_commit_without_a_write_raises(block):
    """A batch that skips the write but publishes the slot (1): published implies written."""
    lab = Lab(chunk=C)
    state, items = lab.create("a", "x"), []
    new = writes(*range(C if block == "deferred" else C + 1))
    candidate = lab.begin(state, items, new)
    before = state_fields(state)
    with pytest.raises(WriteFailed, match="commit without a write"):
        lab.store.commit(candidate)
    assert state_fields(state) == before
    candidate.mark_written(candidate.blocks[0].page)
    assert [v.number for v in lab.store.commit(candidate)] == [1]


@pytest.mark.parametrize("accepted", range(C + 1))
@pytest.mark.parametrize("carried", range(C))
def test_rejected_tokens_never_reach_a_state(carried, accepted):
    """A rejected draft's state in a shared cached block (5): only accepted tokens count."""
    lab = Lab(chunk=C)
    state, items = lab.create("a", "x"), []
    lab.append(state, items, writes(*range(carried)))
    draft = writes(*range(50, 50 + C))
    before, free = state_fields(state), lab.ledger()
    candidate = lab.begin(state, items, draft)
    lab.run(candidate, lab.root, items + draft)
    lab.store.drop(candidate)
    lab.store.drop(candidate)
    assert (state_fields(state), lab.ledger()) == (before, free)
    lab.append(state, items, draft[:accepted])
    lab.check(state, items)
    lab.store.release(state)
    other = lab.create("b", "y", [*items, *writes(99)])
    assert other.clock.position == len(items)
    lab.check(other, items)


def test_a_candidate_commits_once():
    """A candidate that is closed or whose branch moved must not move it again."""
    lab = Lab(chunk=C)
    state, items = lab.create("a", "x"), []
    first = lab.begin(state, items, writes(1))
    lab.store.drop(first)
    second = lab.begin(state, items, writes(2))
    for _ in range(2):
        with pytest.raises(StaleVersion):
            lab.store.commit(first)
    lab.run(second, lab.root, writes(2))
    lab.store.commit(second)
    before = state_fields(state)
    with pytest.raises(StaleVersion):
        lab.store.commit(second)
    assert state_fields(state) == before
    lab.check(state, writes(2))


def test_dropping_a_page_written_in_place_fails_the_branch():
    """A drop after V replaced the tail's targets must not donate that tail."""
    lab = Lab(chunk=C)
    state, items = lab.create("a", "x"), []
    lab.append(state, items, writes(1, 2, 3))
    candidate = lab.begin(state, items, writes(4))
    assert candidate.blocks[0].in_place
    lab.run(candidate, lab.root, items + writes(4))
    lab.store.drop(candidate)
    with pytest.raises(WriteFailed):
        lab.begin(state, items, writes(5))
    lab.store.release(state)
    assert lab.match(lab.root, items).depth == 0 and lab.ledger()[1] == 0


def test_malformed_writes_raise_before_anything_changes():
    """A wrong-length list (15)."""
    lab = Lab(chunk=C)
    state = lab.create("a", "x")
    before, ledger = state_fields(state), lab.ledger()
    for tokens, modes in (
        ([], W),
        ([1, 2], ModeSpans(1)),
        (["a"], W),
        ([1], Effect.CONTROL),
    ):
        with pytest.raises(InvalidStateRequest):
            lab.store.begin_write(state, tokens, modes, 0)
    for limit in (-1, 1):
        with pytest.raises(InvalidStateRequest):
            lab.match(lab.root, [], limit)
    assert (state_fields(state), lab.ledger()) == (before, ledger)


def test_segment_of_a_mixed_forward():
    """A part that spans a mode change or a boundary would read or write the wrong version."""
    lab = Lab(pages=16, bases=3, chunk=2, fold_pages=2)
    state, items = lab.create("a", "x"), []
    lab.append(state, items, writes(1))
    new = [*writes(2), *reads(3), *writes(4, 5, 6), *reads(7), *writes(8)]
    candidate = lab.begin(state, items, new)
    got = [
        (p.offset, p.count, p.writes, p.row, p.completes, p.deferred, len(p.pages))
        for p in candidate.segment.parts
    ]
    assert got == [
        (0, 1, True, 1, True, False, 0),
        (1, 1, False, 0, False, False, 1),
        (2, 2, True, 0, True, False, 1),
        (4, 1, True, 0, False, False, 0),
        (5, 1, False, 1, False, False, 0),
        (6, 1, True, 1, True, True, 0),
    ]
    pages = [p.page for p in candidate.segment.parts]
    assert pages[1] == DUMMY and pages[3] == pages[4] == pages[5]
    folds = [p.fold_base for p in candidate.segment.parts]
    assert folds[2] is not None and folds.count(None) == 5
    assert candidate.segment.parts[3].base == folds[2]
    assert not candidate.blocks[0].in_place and state.tail.page != candidate.blocks[0].page


def test_foreign_pages_cannot_be_marked_written():
    """A write to a page of somebody else counted as this candidate's."""
    lab = Lab(chunk=C)
    state = lab.create("a", "x")
    candidate = lab.begin(state, [], writes(*range(C)))
    with pytest.raises(SlotError):
        candidate.mark_written(candidate.blocks[0].page + 1)
    assert candidate.unwritten == [candidate.blocks[0].page]


def test_slots_are_plain_ints_and_views_are_immutable():
    """An index returned as a view changes under its holder (22)."""
    lab = Lab(pages=16, bases=3, chunk=C, fold_pages=2)
    state, items = lab.create("a", "x"), []
    lab.append(state, items, mixed(4 * C))
    view = lab.store.view(state)
    kept = tuple(getattr(view, name) for name in view.__dataclass_fields__)
    candidate = lab.begin(state, items, mixed(2 * C + 1))
    slots = [p.page for p in candidate.segment.parts] + list(view.pages) + [view.base]
    slots += [s for p in candidate.segment.parts for s in (*p.pages, p.base, p.fold_base)]
    assert all(type(slot) is int for slot in slots if slot is not None)
    lab.run(candidate, lab.root, items + mixed(2 * C + 1))
    lab.store.commit(candidate)
    assert tuple(getattr(view, name) for name in view.__dataclass_fields__) == kept
    with pytest.raises(AttributeError):
        view.rows = 3
    with pytest.raises(AttributeError):
        candidate.segment.parts[0].page = 1


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("carried", range(C))
@pytest.mark.parametrize("n", [1, 2, C - 1, C, C + 1, 2 * C + 1])
def test_pages_needed_says_what_a_write_takes(carried, n, pinned):
    """Admission that counts fewer pages than the write takes: the step then fails midway."""
    lab = Lab(chunk=C)
    state, items = lab.create("a", "x"), []
    lab.append(state, items, writes(*range(carried)))
    if pinned:
        lab.store.pin("a", "p", state)
    wanted = lab.store.pages_needed(state, n)
    before = lab.pages.available
    lab.begin(state, items, writes(*range(n)))
    assert before - lab.pages.available == wanted
