"""Log lines that an operator can parse, and that give no owner's id away.

An owner's id is the capability to use its state, so logs, metrics and listings show its public
name instead: the first hexadecimal digits of a hash of the id.
"""

from __future__ import annotations

import json
import logging
import re
from hashlib import blake2b
from urllib.parse import quote

from sgl_rwttt.core.errors import StateError

_SESSIONS = "sglang.srt.session.session_controller"  # logs each session by its id
_ERRORS = "sglang.srt.entrypoints.http_server"  # logs each error that /generate answers
_ACCESS = "uvicorn.access"  # logs each request by its path
_LONG_ID = re.compile(r"\b[0-9a-f]{32}\b")
_OWNER_FIELD = re.compile(r"\bowner=([0-9a-f]{32})\b")
_OWNER_PATH = re.compile(r"(/ttt/owners/)[^/?\s]+")


def public_name(owner: str) -> str:
    """Eight hexadecimal digits that stand for an owner without giving its id away."""
    return blake2b(owner.encode(errors="replace"), digest_size=4).hexdigest()


def event_line(event: str, error: StateError, **more: object) -> str:
    """One line: ``event type=.. owner=<public name> branch=.. version=.. message="..."``."""
    message = str(error)
    if error.owner:
        message = message.replace(error.owner, public_name(error.owner))
    fields: dict[str, object] = {
        "type": type(error).__name__,
        "owner": public_name(error.owner) if error.owner else "-",
        "branch": "-" if error.branch is None else quote(error.branch, safe=""),
        "version": "-" if error.version is None else error.version,
        **more,
    }
    pairs = " ".join(f"{key}={value}" for key, value in fields.items())
    return f"{event} {pairs} message={json.dumps(message)}"


def hide_owner_ids() -> None:
    """Show public names in the log lines of SGLang and uvicorn that hold owners' ids; idempotent.

    They are written at the default level: a session's opening and closing, the error of a request,
    and every request's path.
    """
    for name, hide in ((_SESSIONS, _hide_sessions), (_ERRORS, _hide_field), (_ACCESS, _hide_paths)):
        logger = logging.getLogger(name)
        if hide not in logger.filters:
            logger.addFilter(hide)


def _hide_sessions(record: logging.LogRecord) -> bool:
    record.msg = _LONG_ID.sub(lambda found: public_name(found[0]), record.getMessage())
    record.args = ()
    return True


def _hide_field(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    for owner in set(_OWNER_FIELD.findall(text)):
        text = text.replace(owner, public_name(owner))
    record.msg, record.args = text, ()
    return True


def _hide_paths(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(
            _OWNER_PATH.sub(r"\1...", value) if isinstance(value, str) else value
            for value in record.args
        )
    return True
