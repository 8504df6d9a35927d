"""Control verbs from the tokenizer process: one call, a dict back, or the typed StateError."""

from __future__ import annotations

import json
from typing import Any

from sgl_rwttt.core.errors import InvalidStateRequest, StateError

OPERATIONS = ("open", "close", "drop", "unpin", "release_root", "state", "info")


async def control(tokenizer_manager: Any, op: str, args: dict[str, Any]) -> dict[str, Any]:
    """Run control verb ``op`` in the scheduler.

    Raises InvalidStateRequest for an unknown verb and whatever StateError the scheduler answers.
    """
    from .io import TTTControlReqInput

    if op not in OPERATIONS:
        raise InvalidStateRequest(f"unknown control verb {op!r}; known: {', '.join(OPERATIONS)}")
    tokenizer_manager.auto_create_handle_loop()
    replies = await tokenizer_manager.ttt_control_communicator(
        TTTControlReqInput(op=op, args=json.dumps(args))
    )
    payload: dict[str, Any] = json.loads(replies[0].payload)
    if not replies[0].ok:
        raise StateError.from_wire(payload)
    return payload
