"""The ``ttt_*`` keys of a request: parsed and checked before anything else looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import InvalidStateRequest
from sgl_rwttt.core.lineage import ID_BYTES

from .arguments import shown
from .limits import MAX_PARAMS, MAX_TEXT

_MODES = {"write": Effect.WRITE, "read": Effect.READ, "off": None}
_CLEARS = ("drop", "commit")
_KEYS = ("ttt_mode", "ttt_root", "ttt_expect", "ttt_pin", "ttt_clear")
_MAX_NAME = 128


@dataclass(frozen=True)
class StateParams:
    """The ``ttt_*`` keys of ``sampling_params.custom_params``."""

    mode: Effect | None  # None: the request owns no state
    root: bytes | None
    expect: bytes | None
    pin: str | None
    clear: str | None


def parse_params(custom: dict[str, Any] | None) -> StateParams:
    """Parse the ``ttt_*`` keys; raises InvalidStateRequest naming the key and its value."""
    if custom is not None and not isinstance(custom, dict):
        raise InvalidStateRequest(f"custom_params must be an object, got {shown(custom)}")
    if len(custom or {}) > MAX_PARAMS:
        raise InvalidStateRequest(
            f"custom_params has {len(custom or {})} keys, and {MAX_PARAMS} are allowed"
        )
    given = {k: v for k, v in (custom or {}).items() if str(k).startswith("ttt_")}
    for key, value in given.items():
        if key not in _KEYS:
            raise InvalidStateRequest(
                f"unknown custom_params key {shown(key)}; known: {list(_KEYS)}"
            )
        if not isinstance(value, str):
            raise InvalidStateRequest(
                f"custom_params key {key!r} must be a string, got {shown(value)}"
            )
    mode = given.get("ttt_mode", "write")
    if mode not in _MODES:
        raise InvalidStateRequest(f"ttt_mode must be one of {list(_MODES)}, got {shown(mode)}")
    clear = given.get("ttt_clear")
    if clear is not None and clear not in _CLEARS:
        raise InvalidStateRequest(f"ttt_clear must be one of {list(_CLEARS)}, got {shown(clear)}")
    pin = given.get("ttt_pin")
    if pin is not None and not 0 < len(pin) <= _MAX_NAME:
        raise InvalidStateRequest(f"ttt_pin must have 1 to {_MAX_NAME} characters")
    return StateParams(
        mode=_MODES[mode],
        root=parse_id(given["ttt_root"], "ttt_root") if "ttt_root" in given else None,
        expect=parse_id(given["ttt_expect"], "ttt_expect") if "ttt_expect" in given else None,
        pin=pin,
        clear=clear,
    )


def check_request(rid: str, tokens: Sequence[int] | None, vocab_size: int) -> None:
    """Raise InvalidStateRequest for a long rid or a token id that the model does not have."""
    if len(rid) > MAX_TEXT:
        raise InvalidStateRequest(f"rid has {len(rid)} characters, and {MAX_TEXT} are allowed")
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        raise InvalidStateRequest(f"token ids must be in [0, {vocab_size})")


_SESSION_TYPES = {
    "id": str,
    "rid": str,
    "offset": int,
    "replace": bool,
    "drop_previous_output": bool,
}


def check_session_params(given: Any) -> None:
    """Raise InvalidStateRequest for a field of another type: SGLang passes on what it was given."""
    for name, kind in _SESSION_TYPES.items():
        value = getattr(given, name)
        if value is not None and type(value) is not kind:
            raise InvalidStateRequest(
                f"session_params.{name} must be of type {kind.__name__}, got {type(value).__name__}"
            )


def parse_id(text: str, key: str) -> bytes:
    """A state or root id from its 32 hexadecimal digits; raises InvalidStateRequest."""
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != ID_BYTES:
        raise InvalidStateRequest(
            f"{key} must be {2 * ID_BYTES} hexadecimal digits, got {shown(text)}"
        )
    return value
