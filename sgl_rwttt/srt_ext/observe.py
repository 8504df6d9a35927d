"""Verbs that only look: all owners by public name, one owner by its id, and the server's health."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from sgl_rwttt.core.errors import IntegrityError
from sgl_rwttt.core.holdings import Holding

from .admission import find_session
from .arguments import flag, only, text
from .limits import MAX_ROWS
from .logs import public_name


def owners(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Every open owner, oldest first, by its public name; at most ``MAX_ROWS`` rows.

    An id is the capability to use its owner, so it is not listed.
    """
    only(args)
    sessions = scheduler.session_controller.sessions
    shown = list(islice(sessions.values(), MAX_ROWS))
    held = scheduler.ttt.store.holdings(session.session_id for session in shown)
    return {
        "owners": [_summary(scheduler, session, held[session.session_id]) for session in shown],
        "count": len(sessions),
        "truncated": len(sessions) > MAX_ROWS,
    }


def owner(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """The lineage of one owner for whoever knows its id: the newest ``MAX_ROWS`` branches.

    With ``memory`` also what it holds, and what of that nobody else does; that walks everybody's
    references. Raises UnknownOwner or OwnerReleased.
    """
    only(args, "owner", "memory")
    memory = flag(args, "memory")
    session = find_session(scheduler.ttt, scheduler.session_controller, text(args, "owner"))
    held = scheduler.ttt.store.holdings([session.session_id])[session.session_id]
    nodes = session.req_nodes
    newest = islice(nodes.values(), max(0, len(nodes) - MAX_ROWS), None)
    return {
        **_summary(scheduler, session, held),
        "owner": session.session_id,
        "branches": [_branch(node) for node in newest],
        "pins": list(islice(held.pins, MAX_ROWS)),
        "roots": [root.hex() for root in islice(held.roots, MAX_ROWS)],
        "truncated": max(len(nodes), len(held.pins), len(held.roots)) > MAX_ROWS,
        **({"memory": _memory(scheduler, session)} if memory else {}),
    }


def health(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Whether the books balance: recounted when nothing runs, else only the ledgers are shown."""
    only(args)
    runtime = scheduler.ttt
    idle = not runtime.rows
    answer: dict[str, Any] = {"status": "ok", "integrity_checked": idle}
    if idle:
        try:
            runtime.check_integrity()
        except IntegrityError as error:
            answer |= {"status": "unbalanced", "error": str(error)}
    return answer | {"running": len(runtime.rows), "ledger": _ledger(runtime.store.stats())}


def _summary(scheduler: Any, session: Any, held: Holding) -> dict[str, Any]:
    backend, now = scheduler.ttt.backend, time.monotonic()
    opened = getattr(session, "ttt_opened", now)
    size = len(held.pages) * backend.page_bytes + len(held.bases) * backend.base_bytes
    return {
        "name": public_name(session.session_id),
        "nodes": len(session.req_nodes),
        "running": held.running,
        "root_count": len(held.roots),
        "pin_count": len(held.pins),
        "referenced_bytes": size,
        "age_s": round(now - opened, 3),
        "idle_s": 0.0 if held.running else round(now - session.last_active_time, 3),
        "timeout_s": session.timeout,
    }


def _memory(scheduler: Any, session: Any) -> dict[str, int]:
    """Slots and bytes that an owner reads, those that nobody else does, and its tokens."""
    runtime, others = scheduler.ttt, Holding()
    backend, owner = runtime.backend, session.session_id
    held = runtime.store.holdings([owner], others)[owner]
    own_pages, own_bases = len(held.pages - others.pages), len(held.bases - others.bases)
    tokens = sum(_tokens(node.req) for node in session.req_nodes.values())
    pool = scheduler.token_to_kv_pool_allocator
    kv_bytes = int(sum(pool.get_kvcache().get_kv_size_bytes())) // (pool.size + pool.page_size)
    return {
        "pages": len(held.pages),
        "own_pages": own_pages,
        "bases": len(held.bases),
        "own_bases": own_bases,
        "state_bytes": len(held.pages) * backend.page_bytes + len(held.bases) * backend.base_bytes,
        "own_bytes": own_pages * backend.page_bytes + own_bases * backend.base_bytes,
        "context_tokens": tokens,
        "kv_bytes": tokens * kv_bytes,
    }


def _tokens(req: Any) -> int:
    """Tokens that a request read beyond those of its parent."""
    lineage = getattr(req, "ttt", None)
    report = None if lineage is None else lineage.current_report()
    return 0 if report is None else max(0, report["position"] - lineage.kept)


def _branch(node: Any) -> dict[str, Any]:
    """One request of a session; its point is null when it was refused or did not start yet."""
    lineage = getattr(node.req, "ttt", None)
    report = (lineage.current_report() if lineage is not None else None) or {}
    point = {key: report.get(key) for key in ("root", "position", "version", "tail", "state_id")}
    return {
        "rid": node.req.rid,
        "parent": None if node.parent is None else node.parent.req.rid,
        "running": not node.req.finished(),
        "mode": None if lineage is None else lineage.mode.value,
        "pin": lineage.pin if lineage is not None and lineage.pinned else None,
        "next_root": report.get("next_root"),
        **point,
    }


def _ledger(stats: dict[str, int]) -> dict[str, dict[str, int]]:
    ledger = {}
    for pool in ("pages", "bases"):
        free, live, total = (stats[f"{pool}_{kind}"] for kind in ("free", "live", "total"))
        ledger[pool] = {"free": free, "live": live, "total": total, "reserved": total - free - live}
    return ledger
