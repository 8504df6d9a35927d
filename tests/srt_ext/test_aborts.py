"""Requests that a client gives up: wherever they are, they end, and nobody else's does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sgl_rwttt.core.errors import InvalidStateRequest, OwnerReleased
from sgl_rwttt.srt_ext import aborts, verbs
from sgl_rwttt.srt_ext.limits import MAX_NAMES


class Grammar:
    is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Request:
    """The parts of SGLang's Req that an abort touches."""

    def __init__(self, rid: str, session: Any, done: bool = False) -> None:
        self.rid, self.session, self.done = rid, session, done
        self.to_finish: Any = None
        self.discard_output_reason: Any = None
        self.grammar = Grammar()

    def finished(self) -> bool:
        return self.done

    def set_finish_with_abort(self, *reason: Any) -> None:
        self.to_finish = SimpleNamespace(message=reason[0], status_code=reason[1])


class Scheduler:
    """One owner with a request in every place."""

    def __init__(self) -> None:
        self.session = SimpleNamespace(session_id="owner", req_nodes={}, close_on_finish=False)
        self.reqs = {
            rid: Request(rid, self.session, rid == "done")
            for rid in ("running", "waiting", "compiling", "chunked", "done", "other")
        }
        for rid, req in self.reqs.items():
            node = SimpleNamespace(req=req, parent=None, children=[])
            self.session.req_nodes[rid] = node
        child, parent = (self.session.req_nodes[rid] for rid in ("running", "done"))
        child.parent = parent
        parent.children.append(child)
        self.waiting_queue = [self.reqs["waiting"]]
        self.grammar_manager = SimpleNamespace(grammar_queue=[self.reqs["compiling"]])
        self.chunked_req = self.reqs["chunked"]
        self._pending_chunked_abort_req: Any = None
        self.ended: list[tuple[str, str]] = []
        self.session_controller = {"owner": self.session}
        self.ttt = SimpleNamespace(is_released=lambda owner: False)

    def end_waiting(self, req: Any, error: Any) -> None:
        self.ended.append((req.rid, type(error).__name__))


def test_a_request_ends_wherever_it_is() -> None:
    """Guards: an abort that misses a place, and a request that runs to its end for nobody."""
    scheduler = Scheduler()
    rids = ["running", "waiting", "compiling", "chunked", "done", "late"]
    answer = verbs.abort(scheduler, {"owner": "owner", "rids": rids})
    assert answer == {"owner": "owner", "aborted": rids[:4]}
    assert scheduler.ended == [("waiting", "OwnerReleased")]
    for rid in ("running", "compiling", "chunked"):
        reason = scheduler.reqs[rid].to_finish
        assert reason.status_code == 410 and "[OwnerReleased owner=owner" in reason.message
    assert scheduler.reqs["compiling"].grammar.is_cancelled
    chunked = scheduler.reqs["chunked"]
    assert scheduler._pending_chunked_abort_req is chunked
    assert chunked.discard_output_reason is chunked.to_finish
    assert scheduler.reqs["other"].to_finish is None
    nodes = scheduler.session.req_nodes
    assert list(nodes) == ["done", "other"]
    assert nodes["done"].children == []


def test_a_late_request_is_refused_once() -> None:
    """Guards: an abort that overtook its request, and then let it run."""
    scheduler = Scheduler()
    aborts.end(scheduler, scheduler.session, ["late"])
    aborts.check_rid(scheduler.session, "another")
    with pytest.raises(OwnerReleased, match="gave it up"):
        aborts.check_rid(scheduler.session, "late")
    aborts.check_rid(scheduler.session, "late")


def test_what_is_remembered_is_bounded() -> None:
    """Guards: a client that fills the server with names of requests that never come."""
    scheduler = Scheduler()
    for i in range(MAX_NAMES + 5):
        aborts.end(scheduler, scheduler.session, [f"late {i}"])
    assert len(scheduler.session.ttt_unwanted) == MAX_NAMES
    with pytest.raises(OwnerReleased):
        aborts.check_rid(scheduler.session, f"late {MAX_NAMES + 4}")


def test_all_of_a_closed_owner() -> None:
    """Guards: requests of a closed owner that go on."""
    scheduler = Scheduler()
    aborts.end_all(scheduler, scheduler.session)
    assert scheduler.ended == [("waiting", "OwnerReleased")]
    ended = [rid for rid, req in scheduler.reqs.items() if req.to_finish is not None]
    assert ended == ["running", "compiling", "chunked", "other"]


@pytest.mark.parametrize("rids", [None, "x", [5], [""], ["x" * 300], ["x"] * (MAX_NAMES + 1)])
def test_lists_are_checked_first(rids: Any) -> None:
    """Guards: a list of another type or length that ends the scheduler, or half of it done."""
    scheduler = Scheduler()
    with pytest.raises(InvalidStateRequest, match="rids"):
        verbs.abort(scheduler, {"owner": "owner", "rids": rids})
    assert scheduler.ended == []


def test_renewals_say_who_is_unknown() -> None:
    """Guards: a client that keeps believing in an owner that is gone."""
    scheduler = Scheduler()
    controller = SimpleNamespace(sessions={"a": None, "b": None})
    scheduler.session_controller = controller  # type: ignore[assignment]
    scheduler.ttt.boot_id = "boot"
    answer = verbs.renew(scheduler, {"owners": ["b", "c", "a", "d"]})
    assert answer == {"boot_id": "boot", "unknown": ["c", "d"]}
    with pytest.raises(InvalidStateRequest, match="unknown arguments"):
        verbs.renew(scheduler, {"owners": [], "timeout": 5})
