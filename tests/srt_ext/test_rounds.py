"""Rounds of decode: which rows of the running batch each forward pass takes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import StateError
from sgl_rwttt.core.planner import Transition
from sgl_rwttt.srt_ext.options import TTTOptions
from sgl_rwttt.srt_ext.rounds import DecodeRounds


class Request:
    """A running request whose owner completes a chunk of ``chunk`` tokens again and again."""

    def __init__(self, rid: str, rows: int, chunk: int = 4, mode: Effect = Effect.WRITE) -> None:
        self.rid = rid
        self.to_finish: Any = None
        self.ttt: Any = SimpleNamespace(state=object(), next_effect=self.effect, branch=rid)
        self.rows, self.chunk, self.mode = rows, chunk, mode
        self.version = self.expected = 0
        self.tokens = 0

    def effect(self) -> Effect:
        completes = self.mode is Effect.WRITE and self.rows + 1 == self.chunk
        return Effect.WRITE if completes else Effect.READ

    def step(self) -> None:
        self.tokens += 1
        if self.mode is Effect.READ:
            return
        self.rows = (self.rows + 1) % self.chunk
        if self.rows == 0:
            self.version += 1
            self.expected += 1


class Runtime:
    """What the rounds ask of the state runtime."""

    def __init__(self, reqs: list[Request]) -> None:
        self.reqs = {req.rid: req for req in reqs}
        self.waits: list[int] = []
        self.failed: list[str] = []
        self.store = SimpleNamespace(owner_state=self.owner_state)
        self.metrics = SimpleNamespace(wait=self.waits.append)

    def owner_state(self, owner: str, branch: str) -> Any:
        req = self.reqs.get(branch)
        if req is None or req.ttt is None:
            return None
        return SimpleNamespace(version=SimpleNamespace(number=req.version))

    def transition(self, lineage: Any, effect: Effect) -> Transition:
        req = self.reqs[lineage.branch]
        return Transition(req.rid, req.rid, "in_place", (4,), effect, req.expected, "cpu")

    def fail(self, lineage: Any, error: StateError) -> None:
        self.failed.append(lineage.branch)
        self.reqs[lineage.branch].to_finish = error


def rounds(reqs: list[Request], **options: Any) -> tuple[DecodeRounds, Runtime]:
    runtime = Runtime(reqs)
    return DecodeRounds(runtime, TTTOptions(**options)), runtime  # type: ignore[arg-type]


def run(planned: DecodeRounds, reqs: list[Request], forwards: int) -> list[list[str]]:
    """Take rows and advance them; the request ids of every forward pass."""
    seen = []
    for _ in range(forwards):
        keep = planned.take(reqs, whole=False)
        assert keep is None or keep, "a forward pass of nobody"
        rows = range(len(reqs)) if keep is None else keep
        seen.append([reqs[i].rid for i in rows])
        for i in rows:
            reqs[i].step()
    return seen


def test_greedy_takes_everybody() -> None:
    """Guards: a default that holds anybody back."""
    reqs = [Request(f"r{i}", i % 4) for i in range(6)]
    planned, runtime = rounds(reqs)
    assert run(planned, reqs, 12) == [[req.rid for req in reqs]] * 12
    assert set(runtime.waits) == {0}
    assert planned.report()["held"] == 0


@pytest.mark.parametrize("budget", [1, 2, 5])
def test_a_boundary_waits_for_company_within_its_budget(budget: int) -> None:
    """Guards: waiting beyond the budget, never waiting, or a READ that waits."""
    reqs = [Request("early", 3), Request("late", 0), Request("frozen", 0, mode=Effect.READ)]
    planned, runtime = rounds(reqs, wait_budget=budget)
    seen = run(planned, reqs, 3 * 4 * 3)
    assert max(runtime.waits) <= budget
    assert planned.report()["max_wait"] == max(runtime.waits) > 0
    assert all("frozen" in names for names in seen)
    gaps = [i for i, names in enumerate(seen) if "early" not in names]
    assert gaps and len(gaps) <= budget * len(runtime.waits)
    assert min(req.tokens for req in reqs[:2]) > 2 * 4


def test_company_that_is_big_enough_is_not_waited_for() -> None:
    """Guards: a target batch that is ignored."""
    reqs = [Request("a", 3), Request("b", 3), Request("c", 0)]
    planned, _ = rounds(reqs, wait_budget=8, target_batch=2)
    assert run(planned, reqs, 1) == [["a", "b", "c"]]
    reqs = [Request("a", 3), Request("c", 0)]
    planned, _ = rounds(reqs, wait_budget=8, target_batch=2)
    assert run(planned, reqs, 1) == [["c"]]


def test_an_indivisible_batch_is_not_held() -> None:
    """Guards: rows held back while penalties share one object over the batch."""
    reqs = [Request("a", 3), Request("c", 0)]
    planned, _ = rounds(reqs, wait_budget=8)
    assert planned.take(reqs, whole=True) is None  # type: ignore[arg-type]


def test_phase_runs_readers_and_writers_apart() -> None:
    """Guards: a forward pass of both, or a request that gets two tokens in one round."""
    reqs = [Request("w", 3), Request("r", 0), Request("v", 3)]
    planned, _ = rounds(reqs, mode="phase")
    assert run(planned, reqs, 2) in ([["w", "v"], ["r"]], [["r"], ["w", "v"]])
    assert [req.tokens for req in reqs] == [1, 1, 1]
    assert planned.report()["rounds"] == 1
    assert run(planned, reqs, 1) == [["w", "r", "v"]]


def test_serial_runs_one_owner_at_a_time_and_serves_all() -> None:
    """Guards: two owners in one forward pass, or one who starves."""
    reqs = [Request(f"r{i}", i % 4) for i in range(5)]
    planned, _ = rounds(reqs, mode="serial")
    seen = run(planned, reqs, 5 * 7)
    assert all(len(names) == 1 for names in seen)
    assert [req.tokens for req in reqs] == [7] * 5


@pytest.mark.parametrize("mode", ["rw", "phase", "serial"])
def test_requests_come_and_go_between_the_forwards_of_a_round(mode: str) -> None:
    """Guards: an index into a batch that changed, or a newcomer who is never taken."""
    reqs = [Request(f"r{i}", i % 4) for i in range(4)]
    planned, runtime = rounds(reqs, mode=mode)
    run(planned, reqs, 1)
    gone, new = reqs[1], Request("new", 2)
    runtime.reqs["new"] = new
    live = [req for req in reqs if req is not gone] + [new]
    run(planned, live, 24)
    assert min(req.tokens for req in live) >= 4
    assert gone.tokens <= 1


@pytest.mark.parametrize("mode", ["rw", "phase", "serial"])
def test_a_leaving_request_gets_its_last_forward_at_once(mode: str) -> None:
    """Guards: an aborted request that holds its KV for as long as it is held back."""
    reqs = [Request("a", 3), Request("b", 0), Request("c", 0)]
    budget = {} if mode == "serial" else {"wait_budget": 8}
    planned, _ = rounds(reqs, mode=mode, **budget)
    reqs[0].to_finish = object()
    assert "a" in run(planned, reqs, 1)[0]
    for req in reqs:
        req.to_finish = object()
    assert run(planned, reqs, 1) == [["a", "b", "c"]]


def test_a_stale_owner_fails_alone() -> None:
    """Guards: one broken expectation that stops the scheduler, or reaches a group."""
    reqs = [Request("a", 3), Request("b", 3), Request("c", 0)]
    planned, runtime = rounds(reqs)
    reqs[1].expected = 7
    planned.take(reqs, whole=False)  # type: ignore[arg-type]
    assert runtime.failed == ["b"]
    assert reqs[0].to_finish is None and reqs[2].to_finish is None


def test_requests_without_state_are_grouped_apart() -> None:
    """Guards: a stateless request in the operator group of an owner, or held back."""
    reqs = [Request("w", 3), Request("r", 0), Request("off", 0)]
    reqs[2].ttt = None
    planned, _ = rounds(reqs, mode="phase")
    seen = run(planned, reqs, 3)
    assert sorted(map(tuple, seen)) == [("off",), ("r",), ("w",)]
