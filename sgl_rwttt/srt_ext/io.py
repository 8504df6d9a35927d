"""The control message from the HTTP or engine process to one scheduler: one verb, JSON args.

An answer carries the ``rid`` of its message.
"""

from __future__ import annotations

from sglang.srt.managers import io_struct


class TTTControlReqInput(io_struct.BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """A control verb (open, close, drop, unpin, state, info) for the scheduler of one rank."""

    op: str
    args: str  # JSON object
    rank: int = 0


class TTTControlReqOutput(io_struct.BaseReq, kw_only=True):  # type: ignore[misc, call-arg]
    """The scheduler's answer: a JSON object, or a StateError in wire form."""

    ok: bool
    payload: str  # JSON object
    owners: int = 0  # open at this rank, after the verb


def register_types() -> None:
    """Make both messages known to SGLang's msgpack transport."""
    io_struct.hook_custom_types(TTTControlReqInput, TTTControlReqOutput)


register_types()
