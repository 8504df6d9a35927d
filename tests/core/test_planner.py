"""Legal groups, and rounds with bounded waiting."""

import pytest

from sgl_rwttt.core import (
    BatchPlanner,
    BranchBusy,
    Effect,
    InvalidStateRequest,
    Round,
    StaleVersion,
    Transition,
    UnknownOwner,
    group_transitions,
)

READ, WRITE = Effect.READ, Effect.WRITE


def step(owner, effect=READ, version=0, shape=("float32", 4), backend="in_place"):
    return Transition(owner, "main", backend, shape, effect, version)


def committed(owner: str, branch: str) -> int:
    if owner == "ghost":
        raise UnknownOwner("no such owner", owner=owner)
    return 0


def test_groups_agree_on_the_phase_key():
    """READ and WRITE, or two shapes, in one operator call."""
    steps = [
        step("a"),
        step("b", WRITE),
        step("c"),
        step("d", shape=("bfloat16", 4)),
        step("e", WRITE),
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


def issued(planned: Round) -> list[tuple[str, tuple[int, ...]]]:
    """Owners and waits of each group."""
    return [("".join(s.owner for s in group.transitions), group.waits) for group in planned.groups]


def held(planned: Round) -> str:
    return "".join(s.owner for s in planned.held)


def plan(planner: BatchPlanner, reads: str, writes: str, **options) -> Round:
    """One round; each letter is an owner."""
    steps = [*(step(owner) for owner in reads), *(step(owner, WRITE) for owner in writes)]
    return planner.plan(steps, committed, **options)


def test_a_budget_of_zero_is_greedy():
    """Guards: a boundary that waits although nobody asked for it."""
    planned = plan(BatchPlanner(), "ab", "c")
    assert issued(planned) == [("ab", (0, 0)), ("c", (0,))] and not planned.held


def test_waits_are_counted_and_end_with_the_budget():
    """Guards: a wait of budget + 1, a wait that starts anew when company comes."""
    planner = BatchPlanner(wait_budget=2)
    assert held(plan(planner, "abc", "d")) == "d"
    assert held(plan(planner, "ab", "cd")) == "cd"
    planned = plan(planner, "a", "bcd")
    assert issued(planned) == [("dcb", (2, 1, 0)), ("a", (0,))] and not planned.held


def test_a_full_group_is_issued_at_once_and_a_larger_one_in_pieces():
    """Guards: owners that wait for more company than one group takes."""
    planner = BatchPlanner(target_batch=2, wait_budget=8)
    assert held(plan(planner, "ab", "c")) == "c"
    assert issued(plan(planner, "b", "ac")) == [("ca", (1, 0)), ("b", (0,))]
    planned = plan(BatchPlanner(target_batch=2, wait_budget=8), "xyz", "abc")
    assert issued(planned) == [
        ("xy", (0, 0)),
        ("z", (0,)),
        ("ab", (0, 0)),
        ("c", (0,)),
    ]


def test_nobody_waits_when_nobody_can_come():
    """Guards: all running owners held at once, and a wait for owners of another rule."""
    planner = BatchPlanner(wait_budget=8)
    assert issued(plan(planner, "", "ab")) == [("ab", (0, 0))]
    other = [step("r", backend="streaming"), step("s", shape=("float32", 8)), step("a", WRITE)]
    assert not planner.plan(other, committed).held
    assert held(plan(planner, "a", "b")) == "b"
    assert issued(plan(planner, "", "b")) == [("b", (1,))]


def test_who_leaves_is_forgotten():
    """Guards: a retracted owner that comes back with its old wait, an entry that is never freed."""
    planner = BatchPlanner(wait_budget=2)
    assert held(plan(planner, "a", "b")) == "b"
    assert held(plan(planner, "a", "")) == ""
    assert [held(plan(planner, "a", "b")) for _ in range(2)] == ["b", "b"]
    assert issued(plan(planner, "a", "b")) == [("b", (2,)), ("a", (0,))]
    assert issued(plan(planner, "ab", "")) == [("ab", (0, 0))]


def test_a_round_without_holding_issues_everybody():
    """Guards: a batch that cannot be divided and is divided, or a lost wait."""
    planner = BatchPlanner(wait_budget=8)
    assert held(plan(planner, "a", "b")) == "b"
    assert issued(plan(planner, "a", "bc", hold=False)) == [("bc", (1, 0)), ("a", (0,))]


def test_control_never_waits():
    """Guards: a rollback or fork held back for company."""
    steps = [step("a"), step("b", Effect.CONTROL)]
    assert not BatchPlanner(wait_budget=8).plan(steps, committed).held


def test_an_empty_round():
    """Guards: a step without running owners."""
    assert BatchPlanner(4, 2).plan([], committed) == Round((), ())


@pytest.mark.parametrize(("target", "budget"), [(0, 0), (-1, 0), (None, -1)])
def test_limits_out_of_range(target, budget):
    """Guards: a planner that can never issue anybody."""
    with pytest.raises(InvalidStateRequest, match="must be at least"):
        BatchPlanner(target, budget)
