"""SGLang's own ``/open_session`` and ``Engine.open_session``: the verb ``open`` by another name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sgl_rwttt.core.errors import InvalidStateRequest, StateError

from .control import control, serves_ttt


def around_open_session(
    original: Callable[..., Awaitable[Any]], manager: Any, obj: Any, request: Any = None
) -> Awaitable[Any]:
    """Open an owner; any other checkpoint gets SGLang's own session."""
    if not serves_ttt(manager):
        return original(manager, obj, request)
    return _open(manager, obj)


async def _open(manager: Any, obj: Any) -> str:
    """The id of a new owner. Raises ValueError with the typed error in one line.

    A chosen id is refused: an owner's id is the capability to use its state.
    """
    try:
        if obj.session_id is not None:
            raise InvalidStateRequest(
                "session_id cannot be chosen with a TTT checkpoint, whose owners are capabilities: "
                "leave it out, or use POST /ttt/open"
            )
        if obj.streaming:
            raise InvalidStateRequest("streaming sessions cannot be used with a TTT checkpoint")
        args = {} if obj.timeout is None else {"timeout": obj.timeout}
        return str((await control(manager, "open", args))["owner"])
    except StateError as error:
        raise ValueError(error.to_header()) from None
