"""Control verbs, run between two steps on the scheduler thread (``VERBS`` lists them)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from sgl_rwttt.core import faults
from sgl_rwttt.core.errors import InvalidStateRequest, StateError

from . import aborts, injection, observe, snapshot_verbs
from .admission import find_node, find_session, point_of
from .arguments import integer, names, only, shown, text, unpack
from .limits import check_place
from .params import parse_id
from .ranks import new_owner, own_rank

logger = logging.getLogger(__name__)

_CAPACITY_OF_STR_LEN = 1 << 20


def handle(scheduler: Any, message: Any) -> Any:
    """Run one control message; answers with JSON, or with the StateError in wire form."""
    from .io import TTTControlReqOutput

    try:
        verb = VERBS.get(message.op)
        if verb is None:
            known = ", ".join(sorted(VERBS))
            raise InvalidStateRequest(f"unknown verb {shown(message.op)}; known: {known}")
        answer = json.dumps(verb(scheduler, unpack(message.args)))
    except Exception as raised:
        error = raised if isinstance(raised, StateError) else _unexpected(message.op, raised)
        scheduler.ttt.note_refusal(error, op=message.op)
        ok, answer = False, json.dumps(error.to_wire())
    else:
        ok = True
    owners = len(scheduler.session_controller.sessions)
    return TTTControlReqOutput(rid=message.rid, ok=ok, payload=answer, owners=owners)


def _unexpected(op: str, raised: Exception) -> StateError:
    """A fault of ours: it ends the verb, and not the scheduler with every owner's state."""
    logger.error("ttt_verb_failed op=%s", shown(op), exc_info=raised)
    return StateError(f"{shown(op)} failed: {raised!r}; the server's log says where")


def open_owner(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Open a session; its id is 128 random bits and is the capability to use the state.

    ``rank`` chooses one of several ranks (``--ttt-rank``).
    """
    from sglang.srt.managers.io_struct import OpenSessionReqInput

    only(args, "timeout", "rank")
    form = scheduler.ttt.form_with(integer(args, "rank"))
    options = scheduler.ttt.options
    timeout = args.get("timeout", options.owner_timeout)
    if timeout is not None and not (isinstance(timeout, int | float) and timeout > 0):
        raise InvalidStateRequest(
            f"'timeout' must be a positive number (seconds), got {shown(timeout)}"
        )
    check_place(options, scheduler.session_controller)
    owner = new_owner(*own_rank())
    scheduler.session_controller.open(
        OpenSessionReqInput(
            capacity_of_str_len=_CAPACITY_OF_STR_LEN, session_id=owner, timeout=timeout
        )
    )
    session, root = scheduler.session_controller.get(owner), scheduler.ttt.roots[form]
    session.ttt_opened, session.ttt_root = time.monotonic(), root
    return {
        "owner": owner,
        "root": root.id.hex(),
        "version": root.number,
        **identity(scheduler, form),
    }


def close_owner(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Close a session: its nodes, roots and pins go; its requests end with OwnerReleased."""
    from sglang.srt.managers.io_struct import CloseSessionReqInput

    only(args, "owner")
    session = find_session(scheduler.ttt, scheduler.session_controller, text(args, "owner"))
    nodes = len(session.req_nodes)
    aborts.end_all(scheduler, session)
    scheduler.session_controller.close(CloseSessionReqInput(session_id=session.session_id))
    return {"owner": session.session_id, "nodes": nodes}


def renew(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Say which of the owners are not open; naming an open one is a use of it (``limits``)."""
    only(args, "owners")
    sessions = scheduler.session_controller.sessions
    unknown = [owner for owner in names(args, "owners") if owner not in sessions]
    return {"boot_id": scheduler.ttt.boot_id, "unknown": unknown}


def abort(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """End requests of one owner with OwnerReleased and forget their nodes.

    One that is still to come is refused when it does. A finished one stays: see ``drop``.
    """
    only(args, "owner", "rids")
    session = find_session(scheduler.ttt, scheduler.session_controller, text(args, "owner"))
    ended = aborts.end(scheduler, session, names(args, "rids"))
    return {"owner": session.session_id, "aborted": ended}


def drop_branch(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Free one finished node and all its descendants, with the pins that they made.

    Raises BranchBusy, changing nothing, when any of them is still running.
    """
    only(args, "owner", "rid")
    owner, rid = text(args, "owner"), text(args, "rid")
    session = find_session(scheduler.ttt, scheduler.session_controller, owner)
    find_node(scheduler.session_controller, session, rid)
    top = session.req_nodes[rid]
    doomed = _subtree(top)
    for node in doomed:
        find_node(scheduler.session_controller, session, node.req.rid)
    if top.parent is not None:
        top.parent.children.remove(top)
    for node in doomed:
        _unpin(scheduler, owner, node.req)
        del session.req_nodes[node.req.rid]
    return {"owner": owner, "dropped": [node.req.rid for node in doomed]}


def _subtree(top: Any) -> list[Any]:
    found, pending = [], [top]
    while pending:
        node = pending.pop()
        found.append(node)
        pending.extend(node.children)
    return found


def _unpin(scheduler: Any, owner: str, req: Any) -> None:
    lineage = getattr(req, "ttt", None)
    if lineage is not None and lineage.pinned:
        scheduler.ttt.store.unpin(owner, lineage.pin)
        lineage.pinned = False


def unpin(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Give one named pin back (a checkpoint that is no longer needed)."""
    only(args, "owner", "name")
    owner, name = text(args, "owner"), text(args, "name")
    session = find_session(scheduler.ttt, scheduler.session_controller, owner)
    scheduler.ttt.store.unpin(owner, name)
    for node in session.req_nodes.values():
        if getattr(node.req, "ttt", None) is not None and node.req.ttt.pin == name:
            node.req.ttt.pinned = False
    return {"owner": owner, "name": name}


def release_root(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Give one root back (a cleared context that no head or checkpoint names any more)."""
    only(args, "owner", "root")
    owner, root = text(args, "owner"), parse_id(text(args, "root"), "root")
    find_session(scheduler.ttt, scheduler.session_controller, owner)
    scheduler.ttt.store.close_root(owner, root)
    return {"owner": owner, "root": root.hex()}


def state_at(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """The state report of a point (rid, offset); the offset's default is the node's full length."""
    only(args, "owner", "rid", "offset")
    owner, rid = text(args, "owner"), text(args, "rid")
    offset = integer(args, "offset")
    session = find_session(scheduler.ttt, scheduler.session_controller, owner)
    req = find_node(scheduler.session_controller, session, rid)
    lineage, chain, at = point_of(scheduler.ttt, req, offset, owner)
    clock = chain.clock_at(at)
    return {
        "owner": owner,
        "branch": rid,
        "root": lineage.root.id.hex(),
        "version": clock.number,
        "tail": clock.rows,
        "position": at,
        "mode": lineage.mode.value,
        "state_id": clock.state_id.hex(),
    }


def identity(scheduler: Any, form: int = 0) -> dict[str, Any]:
    """What a client must know of the server: model, rule (in one of its forms), boot."""
    runtime = scheduler.ttt
    return {
        "boot_id": runtime.boot_id,
        "rule": runtime.backend.name,
        "stateless": runtime.backend.stateless,
        "chunk": runtime.config.chunk,
        "fingerprint": runtime.fingerprints[form],
        "model_path": scheduler.server_args.model_path,
        "vocab_size": scheduler.model_config.vocab_size,
        "context_length": scheduler.model_config.context_len,
    }


def info(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Identity, pools, ledger, counters, and whether the books balance (``observe.health``)."""
    runtime, health = scheduler.ttt, observe.health(scheduler, args)
    return {
        **identity(scheduler),
        "root": runtime.root.hex(),
        "sessions": len(scheduler.session_controller.sessions),
        "running": len(runtime.rows),
        "integrity_checked": health["integrity_checked"] and health["status"] == "ok",
        "integrity_error": health.get("error"),
        "pools": runtime.describe(),
        "store": runtime.store.stats(),
        "counters": dict(runtime.counters),
        "planner": scheduler.ttt_rounds.report(),
    }


VERBS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "open": open_owner,
    "renew": renew,
    "close": close_owner,
    "abort": abort,
    "drop": drop_branch,
    "unpin": unpin,
    "release_root": release_root,
    "state": state_at,
    "info": info,
    "owners": observe.owners,
    "owner": observe.owner,
    "health": observe.health,
    "save": snapshot_verbs.save,
    "restore": snapshot_verbs.restore,
    "snapshots": snapshot_verbs.listing,
}
if faults.allowed():
    VERBS["fault"] = injection.fault
