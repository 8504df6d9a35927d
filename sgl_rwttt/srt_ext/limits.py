"""Limits on what clients can make the server keep; at a limit they get a refusal that names it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from sgl_rwttt.core.errors import StateCapacity

from .options import TTTOptions, flag

MAX_BRANCHES = 4096  # finished requests that one owner keeps
MAX_ROOTS = 1024  # cleared contexts that one owner keeps open
MAX_PARAMS = 64  # keys of custom_params
MAX_TEXT = 256  # characters of an id or a name in a control verb
MAX_ARGUMENTS = 64 * 1024  # bytes of a control verb's arguments
MAX_NAMES = 1000  # owners that one renewal names, or requests that one abort does
MAX_ROWS = 1000  # rows of a listing


def check_place(options: TTTOptions, controller: Any) -> None:
    """Raise StateCapacity when ``--ttt-max-owners`` sessions are open; expired ones are closed."""
    limit = options.max_owners
    if limit is None or len(controller.sessions) < limit:
        return
    controller.maybe_reap(time.monotonic(), interval=0.0)
    if len(controller.sessions) >= limit:
        raise StateCapacity(
            f"{limit} owners are open, as many as {flag('max_owners')} allows: close one, or "
            "raise it"
        )


def check_branches(session: Any) -> None:
    """Raise StateCapacity when a session keeps as many requests as one owner may."""
    if len(session.req_nodes) >= MAX_BRANCHES:
        raise StateCapacity(
            f"the owner keeps {MAX_BRANCHES} finished branches, the limit: free some with "
            "/ttt/drop",
            owner=session.session_id,
        )


def check_roots(roots: int, owner: str) -> None:
    """Raise StateCapacity when an owner may not open one more root."""
    if roots >= MAX_ROOTS:
        raise StateCapacity(
            f"the owner keeps {MAX_ROOTS} roots open, the limit: free some with /ttt/release_root",
            owner=owner,
        )


def keep_running_sessions(reqs: Iterable[Any]) -> None:
    """A session with a request that runs or waits is not idle, however long that takes."""
    now = time.monotonic()
    for req in reqs:
        if req.session is not None:
            req.session.last_active_time = now


def keep_named_sessions(sessions: dict[str, Any], messages: Iterable[Any]) -> None:
    """A session that a message names is not idle, also when the message had to wait until now."""
    now = time.monotonic()
    for message in messages:
        for owner in _owners_named(message):
            session = sessions.get(owner)
            if session is not None:
                session.last_active_time = now


def _owners_named(message: Any) -> list[str]:
    given = getattr(message, "session_params", None)
    if given is not None:
        return _strings([given.id])
    if not hasattr(message, "op"):
        return []
    try:
        args = json.loads(message.args)
    except (ValueError, RecursionError):
        return []  # the verb will say so
    if not isinstance(args, dict):
        return []
    owners = args.get("owners")
    return _strings([args.get("owner"), *(owners if isinstance(owners, list) else ())])


def _strings(values: list[Any]) -> list[str]:
    return [value for value in values if isinstance(value, str)]


def retained_window(options: TTTOptions, fold_pages: int, bases: int) -> int | None:
    """Newest versions that a lineage keeps as memos; None without ``--ttt-retained-versions``.

    A version between two dense bases needs its ancestors back to the older one, so of the K
    versions that may stay, ``fold_pages`` - 1 are left to them. ``bases`` counts the slots that can
    be had. Raises ValueError, naming both flags, when ancestors alone could be more than K.
    """
    kept, option = options.retained_versions, flag("retained_versions")
    if kept is None:
        return None
    if fold_pages == 0:
        raise ValueError(
            f"{option}={kept} cannot be combined with {flag('fold_rows')}=0: a version that is "
            "never folded needs all versions before it"
        )
    if bases < 2:
        raise ValueError(
            f"{option}={kept} needs at least 2 dense bases, and there are {bases}: raise "
            f"{flag('max_bases')}, {flag('dense_fraction')} or {flag('memory_mb')}"
        )
    if kept < fold_pages:
        raise ValueError(
            f"{option}={kept} is less than the {fold_pages} versions between two dense bases: "
            f"raise it to {fold_pages} or more, or lower {flag('fold_rows')}"
        )
    return kept - fold_pages + 1
