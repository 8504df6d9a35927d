"""Arguments of control verbs: JSON from a client, checked before a verb sees it."""

from __future__ import annotations

import json
from typing import Any

from sgl_rwttt.core.errors import InvalidStateRequest

from .limits import MAX_ARGUMENTS, MAX_NAMES, MAX_TEXT


def pack(args: dict[str, Any]) -> str:
    """``args`` as one JSON text. Raises InvalidStateRequest when it is none, or is too long."""
    try:
        packed = json.dumps(args)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidStateRequest(f"the arguments are not a JSON object: {error}") from None
    if len(packed) > MAX_ARGUMENTS:
        raise InvalidStateRequest(
            f"the arguments have {len(packed)} bytes, and {MAX_ARGUMENTS} are allowed"
        )
    return packed


def unpack(packed: str) -> dict[str, Any]:
    """The JSON object in a message. Raises InvalidStateRequest when it is none."""
    try:
        args = json.loads(packed)
    except (ValueError, RecursionError):
        args = None
    if not isinstance(args, dict):
        raise InvalidStateRequest("the arguments must be a JSON object")
    return args


def text(args: dict[str, Any], key: str) -> str:
    """A string argument of 1 to ``MAX_TEXT`` characters."""
    value = args.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT or not _encodable(value):
        raise InvalidStateRequest(
            f"{key!r} must be a string of 1 to {MAX_TEXT} characters, got {shown(value)}"
        )
    return value


def names(args: dict[str, Any], key: str) -> list[str]:
    """A list of at most ``MAX_NAMES`` strings, each as `text` takes it."""
    value = args.get(key)
    if not isinstance(value, list) or len(value) > MAX_NAMES:
        raise InvalidStateRequest(
            f"{key!r} must be a list of at most {MAX_NAMES} strings, got {shown(value)}"
        )
    return [text({key: item}, key) for item in value]


def integer(args: dict[str, Any], key: str) -> int | None:
    """A whole number, None when it is not given; true and false are none."""
    value = args.get(key)
    if value is not None and type(value) is not int:
        raise InvalidStateRequest(f"{key!r} must be an integer, got {shown(value)}")
    return value


def flag(args: dict[str, Any], key: str) -> bool | None:
    """True or false, None when it is not given."""
    value = args.get(key)
    if value is not None and not isinstance(value, bool):
        raise InvalidStateRequest(f"{key!r} must be true or false, got {shown(value)}")
    return value


def only(args: dict[str, Any], *known: str) -> None:
    """Raise InvalidStateRequest for an argument that the verb does not have."""
    unknown = sorted(set(args) - set(known))
    if unknown:
        raise InvalidStateRequest(f"unknown arguments {shown(unknown)}; known: {sorted(known)}")


def shown(value: Any) -> str:
    """A client's value as an error message repeats it: printable, and not longer than a name."""
    written = ascii(value)
    return written if len(written) <= MAX_TEXT else written[:MAX_TEXT] + "..."


def _encodable(value: str) -> bool:
    """Whether it is proper Unicode: a lone surrogate could not be sent back."""
    return not any("\ud800" <= character <= "\udfff" for character in value)
