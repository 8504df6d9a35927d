"""The control message from the HTTP or engine process to the scheduler: one verb, JSON args."""

from __future__ import annotations

from sglang.srt.managers import io_struct


class TTTControlReqInput(io_struct.BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """A control verb (open, close, drop, unpin, state, info) for every scheduler."""

    op: str
    args: str  # JSON object


class TTTControlReqOutput(io_struct.BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """The scheduler's answer: a JSON object, or a StateError in wire form."""

    ok: bool
    payload: str  # JSON object


def register_types() -> None:
    """Make both messages known to SGLang's msgpack transport."""
    io_struct.hook_custom_types(TTTControlReqInput, TTTControlReqOutput)


register_types()
