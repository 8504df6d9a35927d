"""Save and restore of a point in the middle of a context, with its KV (docs/snapshots.md)."""

from __future__ import annotations

import json
import time
import uuid
from array import array
from typing import Any

from sgl_rwttt.core.errors import InvalidStateRequest, RollbackBeyondRetention
from sgl_rwttt.core.lineage import cleared_root_id

from .aborts import check_rid
from .admission import find_node, find_session, kept_tokens, point_of
from .arguments import integer, text
from .context_snapshots import ContextSnapshots, RestoredContext
from .kv_rows import KVRows
from .limits import check_branches, check_roots
from .lineage import RequestLineage, namespace

_REPORTED = ("root", "version", "tail", "position", "mode", "state_id")


def save_context(
    scheduler: Any, snapshots: ContextSnapshots, args: dict[str, Any], replace: bool
) -> dict[str, Any]:
    """Write the point (rid, offset) of a session with the KV of its tokens.

    Raises RollbackBeyondRetention, saying how far, when a part of it was evicted.
    """
    runtime, sessions, cache = scheduler.ttt, scheduler.session_controller, scheduler.tree_cache
    owner, name = text(args, "owner"), text(args, "name")
    session = find_session(runtime, sessions, owner)
    if "root" in args or "rid" not in args:
        raise InvalidStateRequest("'kv' needs a point of a context: name it by 'rid'")
    req = find_node(sessions, session, text(args, "rid"))
    lineage, chain, at = point_of(runtime, req, read_offset(req, integer(args, "offset")), owner)
    if req.extra_key != namespace(None, lineage.root.id, runtime.root) or req.cache_salt:
        raise InvalidStateRequest(
            "the request has an extra_key or a cache_salt, so its KV is in a namespace that a file "
            "does not keep: save without kv",
            owner=owner,
        )
    kv = KVRows(cache)
    tokens = kept_tokens(req)[:at]
    modes = lineage.spans.slice(at)
    slots = kv.find(cache.key_of(lineage.root.id, tokens, modes))
    state = runtime.store.contexts.at(owner, chain, at)
    if len(slots) < at:
        raise RollbackBeyondRetention(
            f"of {at} tokens the KV is retained up to {len(slots)}: consume the point again, then "
            "save",
            owner=owner,
        )
    size = snapshots.save_context(
        name, state, tokens, modes, kv, slots, _client(args), replace=replace
    )
    version, root = state.version, cleared_root_id(state.version.id).hex()
    return {
        "owner": owner,
        "name": name,
        "root": root,  # what a restore without kv opens
        "version": version.number,
        "version_id": version.id.hex(),
        "tail": state.rows,
        "position": at,
        "state_id": chain.state_id_at(at).hex(),
        "tail_dropped": 0,
        "bytes": size,
    }


def read_offset(req: Any, offset: int | None) -> int | None:
    """``offset``, or by default what a request has read: all but its last sampled token."""
    lineage = getattr(req, "ttt", None)
    report = None if lineage is None else lineage.current_report()
    if offset is None and report is not None:
        return int(report["position"])
    return offset


def restore_context(
    scheduler: Any, snapshots: ContextSnapshots, args: dict[str, Any]
) -> dict[str, Any]:
    """Publish a file's point for an owner, as the finished request ``rid``, retained as ``pin``."""
    runtime, cache = scheduler.ttt, scheduler.tree_cache
    owner, name = text(args, "owner"), text(args, "name")
    session = find_session(runtime, scheduler.session_controller, owner)
    rid = text(args, "rid") if "rid" in args else uuid.uuid4().hex
    pin = text(args, "pin") if "pin" in args else rid
    _check_place(runtime, session, rid)
    req = _finished_request(scheduler, session, rid)
    limits = (scheduler.max_req_input_len - 1, scheduler.model_config.vocab_size)
    found = snapshots.restore_context(name, owner, pin, limits, KVRows(cache), cache.key_of)
    lineage = RequestLineage(
        owner=owner,
        branch=rid,
        root=runtime.store.root(owner, found.point.context.root),
        spans=found.context.modes,
        mode=found.context.modes.mode_at(found.point.position - 1),
        chunk=runtime.config.chunk,
        session=True,
        pin=pin,
    )
    lineage.pinned, lineage.chain = True, found.point.context
    _attach(runtime, session, req, lineage, found)
    return {**_described(runtime, lineage, found), "owner": owner, "name": name}


def _check_place(runtime: Any, session: Any, rid: str) -> None:
    owner = session.session_id
    check_branches(session)
    check_roots(len(runtime.store.roots_of(owner)), owner)
    check_rid(session, rid)
    if rid in session.req_nodes:
        raise InvalidStateRequest("the rid was used before in this session", owner=owner)


def _client(args: dict[str, Any]) -> str:
    client = args.get("client", {})
    if not isinstance(client, dict):
        raise InvalidStateRequest("'client' must be a JSON object")
    return json.dumps(client, separators=(",", ":"))


def _finished_request(scheduler: Any, session: Any, rid: str) -> Any:
    """A request as it stands in a session after its end, still without tokens."""
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    req = Req(
        rid,
        "",
        array("q"),
        SamplingParams(max_new_tokens=0),
        session=session,
        vocab_size=scheduler.model_config.vocab_size,
    )
    req.tokenizer = scheduler.tokenizer
    req.finished_reason = FINISH_LENGTH(0)
    return req


def _attach(
    runtime: Any, session: Any, req: Any, lineage: RequestLineage, found: RestoredContext
) -> None:
    """Give the request its tokens and its lineage, and the session the request."""
    from sglang.srt.session.session_controller import SessionReqNode

    req.origin_input_ids = req.origin_input_ids_unpadded = found.tokens
    req.extra_key = namespace(None, lineage.root.id, runtime.root)
    req.ttt, lineage.req = lineage, req
    lineage.settle_at(found.point.context.clock_at(found.point.position))
    runtime.expire_older(lineage, found.point.position)
    session.req_nodes[req.rid] = SessionReqNode(req)
    session.last_active_time = time.monotonic()


def _described(runtime: Any, lineage: RequestLineage, found: RestoredContext) -> dict[str, Any]:
    """The state report of the point, its tokens, and what was taken from where."""
    report, point = lineage.current_report() or {}, found.point
    match = runtime.store.match(
        lineage.root.id, found.tokens, lineage.spans, point.position - 1, lineage.chain
    )
    return {
        **{key: report[key] for key in _REPORTED},
        "rid": lineage.branch,
        "pin": lineage.pin,
        "version_id": found.resumed.version.id.hex(),
        "root_version": lineage.root.number,
        "tokens": list(found.tokens),
        "modes": [(a, b, mode.value) for a, b, mode in lineage.spans.runs()],
        "client": json.loads(found.context.client),
        "reused": not (found.resumed.pages or found.kv_loaded),
        "pages": found.resumed.pages,
        "tail_loaded": found.resumed.tail,
        "kv_loaded": found.kv_loaded,
        "kv_reused": point.position - found.kv_loaded,
        "ready": match.depth,
        "bytes": found.bytes,
    }
