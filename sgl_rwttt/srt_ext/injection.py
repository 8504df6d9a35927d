"""The control verb ``fault``: arms a named fault in the scheduler process. For tests only.

It exists where ``RWTTT_TEST_FAULTS=1`` was set when the server started (docs/failures.md).
"""

from __future__ import annotations

import builtins
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from sgl_rwttt.core import errors, faults
from sgl_rwttt.core.errors import InvalidStateRequest

logger = logging.getLogger(__name__)

_KEYS = {"point", "action", "error", "owner", "branch", "skip", "times", "disarm"}
_OF_BLOCKS = ("write.batch", "write.candidate")  # points that name pages, not a branch


def fault(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Arm one fault, or with ``disarm`` drop all.

    ``owner`` and ``branch`` limit it to one of them, ``skip`` lets visits pass first, ``times`` is
    how often it acts (default 1, 0 = every time). Raises InvalidStateRequest for what it does not
    know, and for an action that has no meaning at the point.
    """
    unknown = sorted(set(args) - _KEYS)
    if unknown:
        raise InvalidStateRequest(f"unknown arguments {unknown}; known: {sorted(_KEYS)}")
    if args.get("disarm"):
        faults.disarm()
        return {"disarmed": True}
    point, name = args.get("point", ""), args.get("action")
    action = _action(scheduler, name, args.get("error"))
    if name in ("abort", "retract") and point in _OF_BLOCKS:
        raise InvalidStateRequest(f"{point} concerns blocks of many: {name!r} needs another point")
    if name == "not_finite" and point != "write.candidate":
        raise InvalidStateRequest("'not_finite' acts at write.candidate only")
    armed = faults.arm(
        point,
        action,
        when=_only_for(scheduler.ttt, args.get("owner"), args.get("branch")),
        skip=_count(args, "skip", 0),
        times=_count(args, "times", 1) or None,
    )
    logger.warning("ttt_fault_armed point=%s action=%s", armed.point, name)
    return {"armed": armed.point}


def _count(args: dict[str, Any], key: str, default: int) -> int:
    value = args.get(key, default)
    if type(value) is not int or value < 0:
        raise InvalidStateRequest(f"{key!r} must be an integer >= 0, got {value!r}")
    return value


def _action(scheduler: Any, name: Any, error: Any) -> faults.Action:
    if name == "raise":
        return faults.raising(_error(error or "RuntimeError"))
    known: dict[str, faults.Action] = {
        "not_finite": faults.not_finite,
        "kill": faults.kill,
        "abort": lambda context: _soon(scheduler, _abort, context["branch"]),
        "retract": lambda context: _soon(scheduler, _retract, context["branch"]),
    }
    if name not in known:
        raise InvalidStateRequest(f"unknown action {name!r}; known: {sorted([*known, 'raise'])}")
    return known[name]


def _error(name: str) -> RuntimeError:
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if not (isinstance(kind, type) and issubclass(kind, RuntimeError)):
        raise InvalidStateRequest(f"error must name a StateError or a RuntimeError, got {name!r}")
    return kind("injected")


def _only_for(
    runtime: Any, owner: str | None, branch: str | None
) -> Callable[[faults.Context], bool]:
    def belongs(names: Any) -> bool:
        return owner in (None, names["owner"]) and branch in (None, names["branch"])

    def when(context: faults.Context) -> bool:
        if "owner" in context:
            return belongs(context)
        wanted = set(context.get("pages") or [context["page"]])
        states = [lineage.state for lineage in runtime.rows.values() if lineage.state is not None]
        return any(
            block.page in wanted
            for state in states
            if state.candidate is not None and belongs(state.names)
            for block in state.candidate.blocks
        )

    return when


def _soon(scheduler: Any, act: Callable[[Any, str], None], branch: str) -> None:
    """Run ``act`` once the scheduler has next read its messages: when a client would be heard."""
    pending = getattr(scheduler, "ttt_pending_faults", None)
    if pending is None:
        pending = scheduler.ttt_pending_faults = deque()
        stock = scheduler.process_input_requests

        def process_input_requests(messages: list[Any]) -> None:
            stock(messages)
            while pending:
                now, name = pending.popleft()
                now(scheduler, name)

        scheduler.process_input_requests = process_input_requests
    pending.append((act, branch))


def _abort(scheduler: Any, branch: str) -> None:
    from sglang.srt.managers.io_struct import AbortReq

    scheduler.abort_request(AbortReq(rid=branch))


def _retract(scheduler: Any, branch: str) -> None:
    """Take one request out of the running batch as SGLang does when memory is short."""
    batch = scheduler.running_batch
    others = [i for i, req in enumerate(batch.reqs) if req.rid != branch]
    for index, req in enumerate(batch.reqs):
        if req.rid == branch:
            batch.release_req(index, len(others))
            scheduler._add_request_to_queue(req, is_retracted=True)
    batch.filter_batch(keep_indices=others)
