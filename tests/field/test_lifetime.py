"""What breaks over the life of an owner: kinds 9 to 11.

Kind 9 on a served engine, at every named point: tests/engine/test_faults.py.
"""

from __future__ import annotations

import pytest

from sgl_rwttt.core import faults
from sgl_rwttt.core.errors import OwnerReleased, SlotError, StaleVersion
from tests.field.rig import C, Field, mixed, prompt, unzip

POINTS = [
    "queued",
    "matched",
    "allocated",
    "mid-prefill",
    "mid-tail",
    "boundary before commit",
    "after commit",
    "finished",
]


def abort_at(field: Field, point: str, turn: int) -> None:
    """One owner's life up to `point`, where its client goes away."""
    context = [*prompt(C + 1), *prompt(C, 10 + turn)]
    tokens, modes = unzip(context)
    if point == "queued":
        return
    if point == "matched":
        field.store.match(field.root, tokens, modes, len(tokens))
        return
    length = {"allocated": 1, "mid-prefill": C - 1, "mid-tail": C + 2}.get(point, 2 * C - 1)
    owner = field.open("a", context[: length - turn % 2])
    if point == "boundary before commit":  # decode completes its open page, prefill a copy
        batch = [(owner, context[length - turn % 2 : length + 1])]
        candidates = field.plan(*batch)
        plan, _ = field.forward_rows(candidates, batch)
        assert field.backend.finish_step(plan) == [True]
        for page in plan.written_pages(0):
            candidates[0].mark_written(page)
    if point in ("after commit", "finished"):
        owner.feed(context[length - turn % 2 : length + 1])
    field.close(owner, keep_tail=point != "finished" or turn % 2 == 0)


@pytest.mark.parametrize("point", POINTS)
def test_an_abort_anywhere_leaves_the_ledger_balanced(point: str) -> None:
    """Kind 9. Guards: an abort between match and allocation, or later, that leaks a slot
    (sglang PR#12693, sglang PR#16067, sglang#20182). N x (open, abort) ends where it began."""
    field = Field(pages=16)
    witness = field.open("w", prompt(C + 2))
    field.store.flush()
    field.after()
    start = field.ledger
    for turn in range(20):
        abort_at(field, point, turn)
        field.after()
        witness.feed(prompt(1, turn)) if turn % 5 == 0 else None
    witness.check()
    assert witness.rollback(C + 2).state.clock.position == C + 2
    field.store.flush()
    field.after()
    assert field.ledger == start


@pytest.mark.parametrize("point", ["write.begin", "publish.allocated", "publish.copied"])
def test_an_exception_at_a_store_point_is_no_leak(point: str) -> None:
    """Kind 9. Guards: slots taken by a step that did not happen (sglang#20182)."""
    field = Field(pages=16)
    owner = field.open("a", prompt(C + 2))
    start = field.ledger
    for turn in range(30):
        with faults.armed(point, faults.raising(MemoryError())), pytest.raises(MemoryError):
            owner.feed(prompt(C + 2, turn))
        field.after()
        assert field.ledger == start
    owner.feed(prompt(C + 2))
    owner.check()


@pytest.mark.parametrize("fold", [0, 2])
def test_open_append_close_ten_times_the_pool(fold: int) -> None:
    """Kind 10. Guards: closing that never frees (sglang PR#23496, sglang PR#26941)."""
    field = Field(pages=8, bases=3, fold_pages=fold)
    for turn in range(10 * 7 // 2):
        owner = field.open(f"o{turn}", mixed(2 * C + 1, turn))
        owner.check()
        field.close(owner)
    field.store.flush()
    assert field.ledger == (7, 0, 2, 0)


@pytest.mark.parametrize("slot", [-1, 0, 8, 99, None, True, 1.0])
def test_freeing_what_is_not_live_raises_and_changes_nothing(slot: object) -> None:
    """Kind 10. Guards: a -1 sentinel, the dummy or a freed slot that enters the free list
    (sglang#40250)."""
    field = Field(pages=8)
    owner = field.open("a", prompt(2 * C + 1))
    pool, ledger = field.store._pages, field.ledger
    with pytest.raises(SlotError):
        pool.free(slot)  # type: ignore[arg-type]
    page = owner.state.version.pages[-1]
    field.close(owner, keep_tail=False)
    field.store.flush()
    with pytest.raises(SlotError):
        pool.free(page)
    with pytest.raises(OwnerReleased):
        field.store.release(owner.state)
    assert field.ledger[0] == ledger[0] + ledger[1]


def test_a_late_write_is_dropped_by_slot_and_generation() -> None:
    """Kind 11. Guards: a finished request's write in a slot that somebody else got
    (sglang PR#29449)."""
    field = Field(pages=4)
    late = field.open("late")
    batch = [(late, prompt(C))]
    (candidate,) = field.plan(*batch)
    page = candidate.blocks[0].page
    held = page, field.store._pages.generation(page)
    plan, _ = field.forward_rows([candidate], batch)
    field.backend.finish_step(plan)
    field.close(late)
    heir = field.open("heir", prompt(2, 5))
    assert heir.state.tail is not None and heir.state.tail.page == page
    assert (page, field.store._pages.generation(page)) != held
    fields, ledger = heir.fields, field.ledger
    with pytest.raises(StaleVersion):
        candidate.mark_written(page)
    with pytest.raises(OwnerReleased):
        field.store.commit(candidate)
    field.store.drop(candidate)
    assert (heir.fields, field.ledger) == (fields, ledger)
    heir.feed(prompt(C, 6))
    heir.check()
