"""Legal groups."""

import pytest

from sgl_rwttt.core import (
    BranchBusy,
    Effect,
    StaleVersion,
    Transition,
    UnknownOwner,
    group_transitions,
)


def step(owner, effect=Effect.READ, version=0, shape=("float32", 4), backend="in_place"):
    return Transition(owner, "main", backend, shape, effect, version)


def committed(owner: str, branch: str) -> int:
    if owner == "ghost":
        raise UnknownOwner("no such owner", owner=owner)
    return 0


def test_groups_agree_on_the_phase_key():
    """READ and WRITE, or two shapes, in one operator call."""
    steps = [
        step("a"),
        step("b", Effect.WRITE),
        step("c"),
        step("d", shape=("bfloat16", 4)),
        step("e", Effect.WRITE),
        step("f", backend="streaming"),
    ]
    groups = group_transitions(steps, committed)
    names = [[s.owner for s in group.transitions] for group in groups]
    assert names == [["a", "c"], ["b", "e"], ["d"], ["f"]]
    assert all(s.key == group.key for group in groups for s in group.transitions)
    assert groups == group_transitions(steps, committed)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (step("a"), BranchBusy),
        (step("b", version=1), StaleVersion),
        (step("ghost"), UnknownOwner),
    ],
    ids=["owner twice", "stale version", "unknown owner"],
)
def test_illegal_batches_raise_and_name_the_owner(bad, error):
    """An unknown, duplicated or stale owner silently served (field failure 15)."""
    with pytest.raises(error) as caught:
        group_transitions([step("a"), bad], committed)
    assert caught.value.owner == bad.owner
