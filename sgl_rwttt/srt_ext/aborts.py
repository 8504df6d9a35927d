"""Requests of an owner that end before their time, because their client gave them up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sgl_rwttt.core.errors import OwnerReleased

from .limits import MAX_NAMES


def end_all(scheduler: Any, session: Any) -> None:
    """End every request of ``session`` that runs or waits; it is about to be closed."""
    for node in list(session.req_nodes.values()):
        if not node.req.finished():
            _end(scheduler, node.req, "its owner was closed")


def end(scheduler: Any, session: Any, rids: Iterable[str]) -> list[str]:
    """End those of the requests that run or wait, and forget their nodes; returns their rids.

    The others that are unknown are remembered, the newest ``MAX_NAMES`` of them: see `check_rid`.
    """
    ended = []
    for rid in rids:
        node = session.req_nodes.get(rid)
        if node is None:
            _remember(session, rid)
        elif not node.req.finished():
            if node.parent is not None:
                node.parent.children.remove(node)
            del session.req_nodes[rid]
            _end(scheduler, node.req, "its client gave it up")
            ended.append(rid)
    return ended


def check_rid(session: Any, rid: str) -> None:
    """Raise OwnerReleased when the request ``rid`` was aborted before it came."""
    if rid in getattr(session, "ttt_unwanted", ()):
        del session.ttt_unwanted[rid]
        raise _error(session.session_id, rid, "its client gave it up")


def _remember(session: Any, rid: str) -> None:
    unwanted: dict[str, None] = session.__dict__.setdefault("ttt_unwanted", {})
    unwanted[rid] = None
    if len(unwanted) > MAX_NAMES:
        del unwanted[next(iter(unwanted))]


def _end(scheduler: Any, req: Any, why: str) -> None:
    """As SGLang ends an aborted request, for this one rid only and with a typed error."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    error = _error(req.session.session_id, req.rid, why)
    if req in scheduler.waiting_queue:
        scheduler.end_waiting(req, error)
        return
    if req in scheduler.grammar_manager.grammar_queue:
        if hasattr(req.grammar, "cancel"):
            req.grammar.cancel()
        req.set_finish_with_abort(error.to_header(), error.http_status, type(error).__name__)
        return
    req.to_finish = FINISH_ABORT(error.to_header(), error.http_status, type(error).__name__)
    if req is scheduler.chunked_req:
        req.discard_output_reason = req.to_finish
        scheduler._pending_chunked_abort_req = req


def _error(owner: str, rid: str, why: str) -> OwnerReleased:
    return OwnerReleased(f"the request was ended: {why}", owner=owner, branch=rid)
