"""The control verbs ``save``, ``restore`` and ``snapshots`` (docs/snapshots.md)."""

from __future__ import annotations

import logging
import time
from typing import Any

from sgl_rwttt.core.errors import InvalidStateRequest
from sgl_rwttt.core.lineage import cleared_root_id
from sgl_rwttt.core.versions import Version

from . import context_verbs
from .admission import find_node, find_session, point_of
from .arguments import flag, integer, only, text
from .context_snapshots import ContextSnapshots
from .limits import check_roots
from .logs import public_name
from .params import parse_id
from .snapshot_folder import FLAG

logger = logging.getLogger(__name__)


def save(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Write the committed version at a point (rid, offset), or at an open root, to a file.

    The offset's default is what the request has read. What is written is what a context reset
    there would keep: the tail is not in the file. With ``kv`` the context is, and its KV.
    """
    only(args, "owner", "name", "rid", "offset", "root", "replace", "kv", "client")
    runtime, snapshots = scheduler.ttt, _snapshots(scheduler)
    owner, name, replace = text(args, "owner"), text(args, "name"), bool(flag(args, "replace"))
    kv, started = flag(args, "kv"), time.monotonic()
    if "client" in args and not kv:
        raise InvalidStateRequest("'client' goes with 'kv': a file of weights has no place for it")
    if kv:
        answer = context_verbs.save_context(scheduler, snapshots, args, replace)
    else:
        version, tail = _point(scheduler, owner, args)
        size = snapshots.save(name, version, replace)
        answer = {**_described(owner, name, version), "tail_dropped": tail, "bytes": size}
    _note(runtime, "save", owner, name, answer["bytes"], started)
    return answer


def restore(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Open the root of a snapshot for an owner; requests then name it as ``ttt_root``.

    A context in the file is restored as the finished request ``rid``, unless ``kv`` is false;
    requests then name that as their parent.
    """
    only(args, "owner", "name", "kv", "rid", "pin")
    runtime, snapshots = scheduler.ttt, _snapshots(scheduler)
    owner, name, kv = text(args, "owner"), text(args, "name"), flag(args, "kv")
    find_session(runtime, scheduler.session_controller, owner)
    started = time.monotonic()
    if kv or (kv is None and snapshots.has_context(name)):
        answer = context_verbs.restore_context(scheduler, snapshots, args)
    else:
        answer = _restore_weights(runtime, snapshots, owner, name)
    _note(runtime, "restore", owner, name, answer["bytes"], started)
    if answer["reused"]:
        runtime.count("snapshot_hits")
    return answer


def _restore_weights(
    runtime: Any, snapshots: ContextSnapshots, owner: str, name: str
) -> dict[str, Any]:
    check_roots(len(runtime.store.roots_of(owner)), owner)
    restored, size = snapshots.restore(name, owner)
    return {
        **_described(owner, name, restored.version),
        "reused": restored.reused,
        "pages": restored.pages,
        "bytes": size,
    }


def listing(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Every snapshot in the folder, with its size and version, or why it cannot be restored."""
    only(args)
    return _snapshots(scheduler).listing()


def _snapshots(scheduler: Any) -> ContextSnapshots:
    snapshots: ContextSnapshots | None = scheduler.ttt.snapshots
    if snapshots is None:
        raise InvalidStateRequest(f"this server keeps no snapshots: start it with {FLAG} FOLDER")
    return snapshots


def _point(scheduler: Any, owner: str, args: dict[str, Any]) -> tuple[Version, int]:
    """(version, tail rows) of the point that ``save`` names."""
    runtime, sessions = scheduler.ttt, scheduler.session_controller
    session = find_session(runtime, sessions, owner)
    if ("rid" in args) == ("root" in args):
        raise InvalidStateRequest("name the point by 'rid' (with 'offset'), or by 'root'")
    if "root" in args:
        if "offset" in args:
            raise InvalidStateRequest("'offset' goes with 'rid'")
        root = parse_id(text(args, "root"), "root")
        return runtime.store.snapshots.cleared(owner, root), 0
    node = find_node(sessions, session, text(args, "rid"))
    offset = context_verbs.read_offset(node, integer(args, "offset"))
    _, chain, at = point_of(runtime, node, offset, owner)
    clock = chain.clock_at(at)
    return runtime.store.snapshots.at(clock.version_id, owner), clock.rows


def _described(owner: str, name: str, version: Version) -> dict[str, Any]:
    """The state that a restore opens, in the words of the state report."""
    root = cleared_root_id(version.id).hex()
    return {
        "owner": owner,
        "name": name,
        "root": root,
        "version": version.number,
        "version_id": version.id.hex(),
        "tail": 0,
        "position": 0,
        "state_id": root,
    }


def _note(runtime: Any, what: str, owner: str, name: str, size: int, started: float) -> None:
    runtime.count(f"snapshot_{what}s")
    logger.info(
        "ttt_%s owner=%s name=%s bytes=%d seconds=%.3f",
        what,
        public_name(owner),
        name,
        size,
        time.monotonic() - started,
    )
