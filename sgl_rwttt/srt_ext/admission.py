"""What a /generate request may ask of the state: parsed and refused before anything changes."""

from __future__ import annotations

from typing import Any

from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.errors import (
    BranchBusy,
    ForeignOwner,
    InvalidStateRequest,
    OwnerReleased,
    StaleVersion,
    UnknownOwner,
    UnknownState,
    UnsupportedByRule,
)
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.versions import Version

from .aborts import check_rid
from .arguments import shown
from .limits import check_branches, check_roots
from .lineage import RequestLineage
from .params import StateParams, check_session_params, parse_params
from .runtime import TTTRuntime

_NO_PENALTY = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
}


def admit(runtime: TTTRuntime, sessions: Any, recv_req: Any) -> RequestLineage | None:
    """The lineage that ``recv_req`` continues, None for ``ttt_mode: off``; nothing is changed.

    ``sessions`` is SGLang's session controller. Raises a StateError for everything that could
    kill or fool the server, or that the owner may not do.
    """
    params = parse_params(recv_req.sampling_params.custom_params)
    _refuse_unsupported_inputs(recv_req)
    _refuse_penalties(runtime, recv_req.sampling_params)
    session_params = recv_req.session_params
    if session_params is not None:
        check_session_params(session_params)
    in_session = session_params is not None and session_params.id is not None
    if params.mode is None:
        _refuse_state(params, session=in_session)
        if not runtime.backend.stateless:
            raise UnsupportedByRule("this model is nothing without its state: leave ttt_mode out")
        return None
    if not in_session:
        return _anonymous(runtime, recv_req, params)
    return _in_session(runtime, sessions, recv_req, params)


def _refuse_unsupported_inputs(recv_req: Any) -> None:
    if recv_req.input_embeds is not None:
        raise InvalidStateRequest("input_embeds cannot be used with a TTT checkpoint")
    if recv_req.mm_inputs is not None:
        raise InvalidStateRequest("multimodal input cannot be used with a TTT checkpoint")
    if recv_req.lora_id is not None:
        raise InvalidStateRequest("LoRA adapters cannot be used with a TTT checkpoint")
    if (recv_req.sampling_params.beam_width or 1) > 1:
        raise InvalidStateRequest("beam search cannot be used with a TTT checkpoint: fork instead")


def _refuse_penalties(runtime: TTTRuntime, sampling: Any) -> None:
    """Penalties share one object over SGLang's running batch, which these modes divide."""
    if runtime.options.mode == "rw":
        return
    for name, value in _NO_PENALTY.items():
        if getattr(sampling, name) != value:
            raise InvalidStateRequest(
                f"{name} cannot be combined with --ttt-mode={runtime.options.mode}: "
                "serve with --ttt-mode=rw"
            )


def _refuse_state(params: StateParams, *, session: bool) -> None:
    """Raise when a request with ``ttt_mode: off`` asks for anything of a state."""
    asked = [
        name
        for name, value in (
            ("ttt_root", params.root),
            ("ttt_expect", params.expect),
            ("ttt_pin", params.pin),
            ("ttt_clear", params.clear),
            ("session_params", session or None),
        )
        if value is not None
    ]
    if asked:
        raise InvalidStateRequest(
            f"a request with ttt_mode 'off' owns no state: it cannot have {', '.join(asked)}"
        )


def _anonymous(runtime: TTTRuntime, recv_req: Any, params: StateParams) -> RequestLineage:
    """A request outside a session owns its state for its own duration."""
    for key, value in (("ttt_root", params.root), ("ttt_pin", params.pin)):
        if value is not None:
            raise InvalidStateRequest(f"{key} needs a session: open one with /ttt/open")
    if params.clear is not None:
        raise InvalidStateRequest("ttt_clear needs a session: open one with /ttt/open")
    root = runtime.default_root
    _expect(params, root.id, root.number, owner=recv_req.rid, branch=None)
    return RequestLineage(
        owner=recv_req.rid,
        branch=recv_req.rid,
        root=root,
        spans=ModeSpans(len(recv_req.input_ids), params.mode),
        mode=params.mode,
        chunk=runtime.config.chunk,
    )


def _in_session(
    runtime: TTTRuntime, sessions: Any, recv_req: Any, params: StateParams
) -> RequestLineage:
    session = find_session(runtime, sessions, recv_req.session_params.id)
    owner, given = session.session_id, recv_req.session_params
    _refuse_rewrites(owner, given)
    if recv_req.rid in session.req_nodes:
        raise InvalidStateRequest(
            f"rid {shown(recv_req.rid)} was used before in this session: every request needs "
            "its own",
            owner=owner,
            branch=recv_req.rid,
        )
    check_rid(session, recv_req.rid)
    if params.clear == "commit":
        raise UnsupportedByRule(
            "the rule writes complete chunks only: clear with tail='drop'", owner=owner
        )
    check_branches(session)
    if params.clear is not None:
        check_roots(len(runtime.store.roots_of(owner)), owner)
    starts: tuple[str, ...] = ()
    if given.rid is None:
        root, spans = _session_root(runtime, session, given, params), ModeSpans()
    else:
        root, spans, starts = _continue(runtime, sessions, session, given, params)
    kept = len(spans)
    spans.append(len(recv_req.input_ids), params.mode)
    if len(spans) == 0:
        raise InvalidStateRequest("the request has no tokens", owner=owner)
    lineage = RequestLineage(
        owner=owner,
        branch=recv_req.rid,
        root=root,
        spans=spans,
        mode=params.mode,
        chunk=runtime.config.chunk,
        session=True,
        pin=params.pin,
        clear=params.clear,
    )
    lineage.starts, lineage.kept = starts, kept
    return lineage


def find_session(runtime: TTTRuntime, sessions: Any, owner: str) -> Any:
    """The open session of ``owner``; raises OwnerReleased or UnknownOwner."""
    session = sessions.get(owner) if owner in sessions else None
    if session is not None and not session.close_on_finish:
        return session
    if session is not None or runtime.is_released(owner):
        raise OwnerReleased(f"session {owner} was closed", owner=owner)
    raise UnknownOwner(f"session {owner} does not exist", owner=owner)


def find_node(sessions: Any, session: Any, rid: str) -> Any:
    """The finished request ``rid``; raises ForeignOwner, UnknownState or BranchBusy."""
    node = session.req_nodes.get(rid)
    owner = session.session_id
    if node is None:
        if any(rid in other.req_nodes for other in sessions.sessions.values()):
            raise ForeignOwner(f"branch {rid} belongs to another owner", owner=owner, branch=rid)
        raise UnknownState(f"branch {rid} does not exist in this session", owner=owner, branch=rid)
    if not node.req.finished():
        raise BranchBusy(f"branch {rid} is still running", owner=owner, branch=rid)
    return node.req


def kept_tokens(req: Any) -> Any:
    """The tokens of a finished session request: prompt, then the output up to its limit."""
    return req.origin_input_ids + req.output_ids[: req.sampling_params.max_new_tokens]


def point_of(
    runtime: TTTRuntime, req: Any, offset: int | None, owner: str
) -> tuple[RequestLineage, ContextChain, int]:
    """(lineage, chain, offset) of a finished request; None as offset is its full length."""
    lineage: RequestLineage | None = getattr(req, "ttt", None)
    tokens = kept_tokens(req)
    if lineage is None or lineage.prompt != len(req.origin_input_ids):
        raise InvalidStateRequest(
            f"branch {req.rid} was refused and holds nothing to continue", owner=owner
        )
    length = len(tokens)
    at = length if offset is None else offset
    if not 1 <= at <= length:
        raise InvalidStateRequest(
            f"offset {at} is outside 1..{length} of branch {req.rid}", owner=owner, branch=req.rid
        )
    return lineage, lineage.sync(tokens, length), at


def _refuse_rewrites(owner: str, given: Any) -> None:
    if given.replace:
        raise InvalidStateRequest(
            "session_params.replace is refused: name a parent rid", owner=owner
        )
    if given.drop_previous_output:
        raise InvalidStateRequest(
            "session_params.drop_previous_output is refused: give the offset to keep", owner=owner
        )


def _session_root(runtime: TTTRuntime, session: Any, given: Any, params: StateParams) -> Version:
    """The root that a new context of the session starts at: its own, or one that it names."""
    owner = session.session_id
    if given.offset is not None:
        raise InvalidStateRequest("offset needs a parent rid", owner=owner)
    root: Version = getattr(session, "ttt_root", runtime.default_root)
    if params.root is not None:
        root = runtime.store.root(owner, params.root)
    _expect(params, root.id, root.number, owner=owner, branch=None)
    return root


def _continue(
    runtime: TTTRuntime, sessions: Any, session: Any, given: Any, params: StateParams
) -> tuple[Version, ModeSpans, tuple[str, ...]]:
    """(root, modes of the kept tokens, "forks" and "rollbacks" as they apply)."""
    owner = session.session_id
    if params.root is not None:
        raise InvalidStateRequest(
            "ttt_root cannot be given together with a parent rid", owner=owner
        )
    parent = find_node(sessions, session, given.rid)
    lineage, chain, at = point_of(runtime, parent, given.offset, owner)
    number = chain.boundary(chain.index_at(at)).number
    _expect(params, chain.state_id_at(at), number, owner=owner, branch=given.rid)
    starts = {
        "forks": bool(session.req_nodes[given.rid].children),
        "rollbacks": at < len(kept_tokens(parent)),
    }
    kinds = tuple(name for name, applies in starts.items() if applies)
    return lineage.root, lineage.spans.slice(at), kinds


def _expect(
    params: StateParams, actual: bytes, number: int, *, owner: str, branch: str | None
) -> None:
    if params.expect is not None and params.expect != actual:
        raise StaleVersion(
            f"expected state {params.expect.hex()}, the branch is at {actual.hex()}",
            owner=owner,
            branch=branch,
            version=number,
        )
