"""What breaks when states and names are mixed up: kinds 14 to 16.

Kind 14 with KV, on a served engine: test_owners_with_different_roots_never_share in
tests/engine/test_prefix_cache.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import (
    BranchBusy,
    ForeignOwner,
    InvalidStateRequest,
    OwnerReleased,
    StateError,
    UnknownState,
)
from sgl_rwttt.core.planner import Transition, group_transitions
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.versions import Version
from tests.assert_close import assert_close
from tests.field.rig import C, Field, Owner, mixed, prompt

QUESTION = mixed(2 * C + 2, 9)


def adapted(field: Field, name: str, seed: int, blocks: int) -> Version:
    """The root that `name` leaves after `blocks` chunks of its own."""
    owner = field.open(name, prompt(blocks * C, seed))
    root = field.store.open_root(name, owner.state.version)
    field.owners.remove(owner)
    field.store.release(owner.state)
    field.after()
    return field.store.root(name, root)


def ask(field: Field, name: str, root: Version | None) -> tuple[bytes, list[torch.Tensor]]:
    """One owner's answer to the question: its state id and weights."""
    owner = field.open(name, QUESTION, root)
    owner.check()
    answer = (
        owner.state.clock.state_id,
        [field.backend.dense(owner.state.version, s) for s in (0, 1)],
    )
    field.owners.remove(owner)
    field.store.release(owner.state)
    field.after()
    return answer


@pytest.mark.parametrize("fold", [0, 2])
def test_states_of_different_roots_never_meet(fold: int) -> None:
    """Kind 14. Guards: a prefix computed under state A reused for B, or for a re-made A (vllm#3264,
    vllm#30931, vllm#42125, vllm#44250): base, A v0, A v1, B v0 with one prompt equal cold runs."""

    def make(field: Field, which: str) -> Version | None:
        seeds = {"A v0": (1, 1), "A v1": (1, 2), "B v0": (2, 1), "re-made A": (3, 1)}
        return adapted(field, which[:1], *seeds[which]) if which in seeds else None

    order = ["base", "A v0", "A v1", "B v0", "re-made A"]
    cold = {}
    for which in order:
        field = Field(pages=60, bases=20, fold_pages=fold)
        cold[which] = ask(field, "x" + which, make(field, which))
    shared = Field(pages=60, bases=20, fold_pages=fold)
    roots = {which: make(shared, which) for which in order}
    for which in [*order, *reversed(order)]:
        state_id, weights = ask(shared, "x" + which, roots[which])
        assert state_id == cold[which][0]
        for a, b in zip(weights, cold[which][1], strict=True):
            assert_close(a, b, 1e-6)
    assert len({state_id for state_id, _ in cold.values()}) == len(order)
    assert shared.hits >= len(order) * len(QUESTION)


def test_unknown_closed_and_duplicate_names_raise_before_anything_changes() -> None:
    """Kind 15. Guards: a name that silently means the base model (peft PR#2090, ms-swift#5285,
    vllm#10798): unknown, closed, duplicate, foreign, and a list of the wrong length."""
    field = Field()
    owner, other = field.open("a", prompt(C + 1)), field.open("b", prompt(2, 3))
    root = field.store.open_root("a", owner.state.version)
    closed = field.open("c", prompt(1))
    field.close(closed)
    store, tokens, two, one = field.store, [1, 2], ModeSpans(2), ModeSpans(1)
    match = store.match(field.root, tokens, two, 2)
    w = Effect.WRITE

    def step(state: Owner, version: int) -> Transition:
        names = state.state.owner, state.state.branch
        return Transition(*names, "in_place", (), w, version)

    def committed(name: str, branch: str) -> int:
        state = store.owner_state(name, branch)
        assert state is not None
        return state.version.number

    calls: list[tuple[type[StateError], str, Any]] = [
        (UnknownState, "ff" * 16, lambda: store.root("a", b"\xff" * 16)),
        (ForeignOwner, root.hex(), lambda: store.root("b", root)),
        (ForeignOwner, "b", lambda: store.pin("b", "p", owner.state)),
        (UnknownState, "nothing", lambda: store.unpin("a", "nothing")),
        (OwnerReleased, "released", lambda: store.begin_write(closed.state, [1], w, 0)),
        (OwnerReleased, "released", lambda: store.fork(closed.state, "d", "b")),
        (BranchBusy, "live", lambda: store.create("b", "b", match, field.root, tokens, two)),
        (BranchBusy, "twice", lambda: group_transitions([step(other, 0)] * 2, committed)),
        (InvalidStateRequest, "1 tokens", lambda: store.begin_write(owner.state, tokens, one, 0)),
        (InvalidStateRequest, "token", lambda: store.begin_write(owner.state, ["x"], w, 0)),
    ]  # fmt: skip
    before = field.store.stats(), field.ledger, owner.fields, other.fields
    for kind, named, call in calls:
        with pytest.raises(kind) as caught:
            call()
        error = caught.value
        assert named in str(error) or named in (error.owner, error.branch), (named, error)
        assert (field.store.stats(), field.ledger, owner.fields, other.fields) == before
    for live in (owner, other):
        live.feed(prompt(C, 8))
        live.check()


def test_a_zero_delta_is_the_base_and_another_one_is_not() -> None:
    """Kind 15. Guards: a state that is served but not applied (vllm#10798)."""
    field = Field()
    owner = field.open("a", prompt(C - 1))
    (before,) = field.feed((owner, mixed(1, 4)))  # completes the first chunk under version 0
    assert not before.any()
    (after,) = field.feed((owner, mixed(1, 4)))
    assert after.any()
    idle = Field(lr=0.0).open("a", prompt(3 * C))
    (zero,) = idle.field.feed((idle, prompt(1)))
    assert not zero.any() and idle.state.version.number == 3


@pytest.mark.parametrize("fold", [0, 1])
def test_a_commit_changes_nobody_in_flight(fold: int) -> None:
    """Kind 16. Guards: a publish that reaches or aborts whoever is running (lmdeploy#4917,
    NeMo-RL PR#4018, sglang PR#27886): the states of B and C are bit for bit those without A, their
    answers those up to the order of a sum; A equals a replay."""

    def lineup(with_a: bool) -> tuple[Field, list[list[torch.Tensor]]]:
        field = Field(pages=60, bases=20, fold_pages=fold)
        b, c = field.open("b", prompt(C + 1, 2)), field.open("c", prompt(2 * C - 1, 3))
        a = field.open("a", prompt(C - 2, 1)) if with_a else None
        seen: list[list[torch.Tensor]] = []
        for step in range(2 * C):
            batch = [(b, prompt(1, 20 + step)), (c, prompt(1, 30 + step))]
            if a is not None:
                batch.append((a, prompt(1, 40 + step)))
            seen.append(field.feed(*batch)[:2])
        return field, seen

    (alone, without), (field, within) = lineup(False), lineup(True)
    for before, after in zip(without, within, strict=True):
        for x, y in zip(before, after, strict=True):
            assert_close(x, y, 1e-6)
    for x, y in zip(alone.owners[:2], field.owners[:2], strict=True):
        assert x.fields == y.fields
        held, other = alone.content(x.state.version), field.content(y.state.version)
        assert all(torch.equal(held[k], other[k]) for k in held)
    a = field.owners[2]
    assert a.state.version.number == 2
    a.check()
    replay = Field(fold_pages=fold).open("a", a.context)
    assert replay.state.clock.state_id == a.state.clock.state_id
