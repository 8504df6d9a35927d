"""The control verbs ``save``, ``restore`` and ``snapshots`` (docs/snapshots.md)."""

from __future__ import annotations

import logging
import time
from typing import Any

from sgl_rwttt.core.errors import InvalidStateRequest
from sgl_rwttt.core.lineage import cleared_root_id
from sgl_rwttt.core.versions import Version

from .admission import find_node, find_session, point_of
from .arguments import integer, only, shown, text
from .limits import check_roots
from .logs import public_name
from .params import parse_id
from .snapshot_folder import FLAG
from .snapshots import Snapshots

logger = logging.getLogger(__name__)


def save(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Write the committed version at a point (rid, offset), or at an open root, to a file.

    The offset's default is what the request has read. What is written is what a context reset
    there would keep: the tail is not in the file.
    """
    only(args, "owner", "name", "rid", "offset", "root", "replace")
    runtime, snapshots = scheduler.ttt, _snapshots(scheduler)
    owner, name, replace = text(args, "owner"), text(args, "name"), args.get("replace", False)
    if not isinstance(replace, bool):
        raise InvalidStateRequest(f"'replace' must be true or false, got {shown(replace)}")
    version, tail = _point(scheduler, owner, args)
    started = time.monotonic()
    size = snapshots.save(name, version, replace)
    _note(runtime, "save", owner, name, size, started)
    return {**_described(owner, name, version), "tail_dropped": tail, "bytes": size}


def restore(scheduler: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Open the root of a snapshot for an owner; requests then name it as ``ttt_root``."""
    only(args, "owner", "name")
    runtime, snapshots = scheduler.ttt, _snapshots(scheduler)
    owner, name = text(args, "owner"), text(args, "name")
    find_session(runtime, scheduler.session_controller, owner)
    check_roots(len(runtime.store.roots_of(owner)), owner)
    started = time.monotonic()
    restored, size = snapshots.restore(name, owner)
    _note(runtime, "restore", owner, name, size, started)
    if restored.reused:
        runtime.count("snapshot_hits")
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


def _snapshots(scheduler: Any) -> Snapshots:
    snapshots: Snapshots | None = scheduler.ttt.snapshots
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
    offset = integer(args, "offset")
    node = find_node(sessions, session, text(args, "rid"))
    lineage, chain, at = point_of(runtime, node, offset, owner)
    report = lineage.current_report()
    if offset is None and report is not None:
        at = report["position"]  # the last sampled token is read by the next request
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
