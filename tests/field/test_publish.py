"""What breaks where a state is published, shared and taken back: kinds 5 to 8 and 18."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_rwttt.core import faults
from sgl_rwttt.core.lineage import LineageClock
from sgl_rwttt.core.owners import OwnerState
from tests.field.rig import C, Field, Owner, mixed, prompt

POINTS = ["publish.allocated", "publish.copied"]


@pytest.mark.parametrize("rejected", range(1, C + 1))
@pytest.mark.parametrize("carried", range(C))
def test_rejected_tokens_leave_no_trace(carried: int, rejected: int) -> None:
    """Kind 5. Guards: a rejected draft's state in a shared block (vllm#53912, vllm#43559)."""
    field = Field()
    shared = prompt(2 * C + carried, 1)
    owner = field.open("a", shared)
    draft = prompt(C, 2)
    ledger = field.ledger
    candidates = field.plan((owner, draft))
    field.forward_rows(candidates, [(owner, draft)])
    field.store.drop(candidates[0])
    field.after()
    assert field.ledger == ledger
    accepted = draft[: C - rejected]
    owner.feed(accepted)
    owner.check()
    again = owner.rollback(len(shared) + len(accepted))
    again.check()
    other = field.open("b", [*shared, *prompt(3, 4)])
    other.check()
    assert field.hits >= len(shared)


@pytest.mark.parametrize("fold", [0, 1, 3])
def test_a_committed_version_never_changes(fold: int) -> None:
    """Kind 6. Guards: a late write through an alias that was given to the cache (FreeToken#287,
    LMCache#4247): bit for bit, whatever the owner does next."""
    field = Field(pages=60, bases=20, fold_pages=fold)
    owner = field.open("a", prompt(2 * C + 1))
    field.store.pin("a", "here", owner.state)
    handle = owner.state.version
    before = field.content(handle)
    rows = field.backend.tail(owner.state.tail.page, 1, 0)
    page = owner.state.tail.page

    def unchanged() -> None:
        after = field.content(handle)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[k], after[k]) for k in before)
        kept = field.backend.tail(page, 1, 0)
        assert torch.equal(rows[0], kept[0]) and torch.equal(rows[1], kept[1])

    for piece in (1, 1, 1, C, 3 * C):
        owner.feed(prompt(piece, piece))
        unchanged()
    twin = owner.fork("b")
    twin.feed(prompt(C, 9))
    unchanged()
    owner = owner.rollback(2 * C + 2)
    owner.feed(prompt(2 * C, 7))
    unchanged()
    field.owners.remove(owner)
    field.store.release(owner.state)
    field.store.flush()
    field.after()
    unchanged()
    field.open("late", prompt(2 * C + 1)).check()


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("operation", ["restore", "fork", "commit"])
def test_nothing_is_visible_before_its_copy_finished(operation: str, point: str) -> None:
    """Kind 7. Guards: an exception or abort between allocate and copy-done that leaves a slot
    visible or lost (sglang PR#30986)."""
    field = Field()
    context = prompt(C + 2)
    owner = field.open("a", context)
    field.store.pin("a", "p", owner.state)
    calls: dict[str, Any] = {
        "restore": lambda: field.open("b", context),
        "fork": lambda: owner.fork("b"),
        "commit": lambda: owner.feed(prompt(3, 5)),
    }
    stats, ledger, fields = field.store.stats(), field.ledger, owner.fields
    with (
        faults.armed(point, faults.raising(RuntimeError("injected"))) as fault,
        pytest.raises(RuntimeError, match="injected"),
    ):
        calls[operation]()
    assert fault.hits == 1
    assert (field.store.stats(), field.ledger, owner.fields) == (stats, ledger, fields)
    field.after()
    calls[operation]()
    for live in field.owners:
        live.check()


@pytest.mark.parametrize("base", [0, 1, C - 1, C, 2 * C + 1])
@pytest.mark.parametrize("fold", [0, 1])
def test_five_forks_leave_their_base_alone(base: int, fold: int) -> None:
    """Kind 8. Guards: a fork by reference that mutates what it shares (MemOS#2301)."""
    field = Field(pages=60, bases=20, fold_pages=fold)
    parent = field.open("base", mixed(base))
    content, fields = field.content(parent.state.version), parent.fields
    children = [parent.fork(f"child{i}") for i in range(5)]
    rests = [mixed(7, 10 + i) for i in range(5)]
    for i in range(7):
        field.feed(*((child, [rest[i]]) for child, rest in zip(children, rests, strict=True)))
    after = field.content(parent.state.version)
    assert all(torch.equal(content[k], after[k]) for k in content)
    assert parent.fields == fields
    for child, rest in zip(children, rests, strict=True):
        child.check()
        cold = Field(fold_pages=fold).open("cold", [*mixed(base), *rest])
        assert child.state.clock.state_id == cold.state.clock.state_id


def test_a_reset_forgets_every_field() -> None:
    """Kind 8. Guards: a reset that forgets a field (transformers PR#32159): every slot of the
    record and of its clock is accounted for."""
    field = Field()
    owner = field.open("a", mixed(2 * C + 3))
    root = field.store.root("a", field.store.open_root("a", owner.state.version))
    fresh = field.open("b2", root=field.store.root("a", root.id))
    first = Field().open("a")
    expected: dict[str, Any] = {slot: getattr(first.state, slot) for slot in OwnerState.__slots__}
    expected |= {"owner": "b2", "generation": fresh.state.generation, "version": root}
    expected.pop("clock")
    found = {slot: getattr(fresh.state, slot) for slot in OwnerState.__slots__ if slot != "clock"}
    assert found == expected
    clock = {slot: getattr(first.state.clock, slot) for slot in LineageClock.__slots__}
    clock |= {"root": root.id, "version_id": root.id, "number": root.number}
    assert {s: getattr(fresh.state.clock, s) for s in LineageClock.__slots__} == clock
    fresh.feed(mixed(C + 2, 3))
    fresh.check()


@pytest.mark.parametrize("k", [*range(1, C + 1), C + 2, 2 * C + 1])
@pytest.mark.parametrize("start", [1, C - 1, C, C + 2])
@pytest.mark.parametrize("keep", ["all", "nothing"])
def test_rollback_restores_every_field(start: int, k: int, keep: str) -> None:
    """Kind 18. Guards: a rollback of KV without state or open chunk (vllm#39273, mlx-lm PR#1109).

    Advance k, roll back k, advance the same k; with ``nothing`` every memo was lost meanwhile.
    """
    field = Field()
    owner, new = field.open("a", prompt(start)), prompt(k, 5)
    at_start = owner.fields
    owner.feed(new)
    advanced = owner.fields
    if keep == "nothing":
        owner = rolled_back_cold(field, owner, start)
    else:
        owner = owner.rollback(start)
    assert owner.fields == at_start
    owner.check()
    owner.feed(new)
    assert owner.fields == advanced
    owner.check()


def rolled_back_cold(field: Field, owner: Owner, length: int) -> Owner:
    """A rollback for which no earlier point is retained: recomputed from the root."""
    context = owner.context[:length]
    field.close(owner, keep_tail=False)
    field.store.flush()
    field.after()
    before = field.hits
    again = field.open("a", context)
    assert field.hits == before
    return again
