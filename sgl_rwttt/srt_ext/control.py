"""Control verbs from the tokenizer process: one call, a dict back, or the typed StateError."""

from __future__ import annotations

import json
from typing import Any

from sgl_rwttt.core import faults
from sgl_rwttt.core.errors import InvalidStateRequest, StateError

from .arguments import pack, shown
from .options import TTTOptions

OPERATIONS = (
    "open",
    "renew",
    "close",
    "abort",
    "drop",
    "unpin",
    "release_root",
    "state",
    "info",
    "owners",
    "owner",
    "health",
    "save",
    "restore",
    "snapshots",
)


def operations() -> tuple[str, ...]:
    """The verbs of this process; ``fault`` only where failures may be injected."""
    return (*OPERATIONS, "fault") if faults.allowed() else OPERATIONS


async def control(tokenizer_manager: Any, op: str, args: dict[str, Any]) -> dict[str, Any]:
    """Run control verb ``op`` in the scheduler.

    Raises InvalidStateRequest for an unknown verb and whatever StateError the scheduler answers.
    """
    from .io import TTTControlReqInput

    if op not in operations():
        raise InvalidStateRequest(f"unknown verb {shown(op)}; known: {', '.join(operations())}")
    packed = pack(args)
    tokenizer_manager.auto_create_handle_loop()
    replies = await tokenizer_manager.ttt_control_communicator(
        TTTControlReqInput(op=op, args=packed)
    )
    payload: dict[str, Any] = json.loads(replies[0].payload)
    if not replies[0].ok:
        raise StateError.from_wire(payload)
    return payload


def serves_ttt(tokenizer_manager: Any) -> bool:
    """Whether the checkpoint is served with a rule."""
    own = bool(getattr(tokenizer_manager.model_config.hf_config, "ttt_mode", False))
    return own or TTTOptions.from_env().backend is not None
