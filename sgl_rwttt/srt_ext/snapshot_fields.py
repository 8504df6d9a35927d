"""Header fields of a snapshot: the chain of a version as text, and the refusal of one field."""

from __future__ import annotations

import re
from typing import Any, NoReturn

from sgl_rwttt.core.errors import IncompatibleSnapshot
from sgl_rwttt.core.snapshots import Chain, Link

_LETTERS = {"root": "r", "base": "b", "page": "p", "slot": "s", "same": "n", "clear": "c"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_LINK = re.compile(r"([rbpsnc])(0|[1-9][0-9]{0,15}):([0-9a-f]{32})")


def refuse(field: str, reason: str) -> NoReturn:
    """Raise IncompatibleSnapshot for one field."""
    raise IncompatibleSnapshot(f"{field}: {reason}")


def encode_chain(chain: Chain) -> str:
    """Links as "<kind><version number>:<id>", separated by spaces, oldest first."""
    return " ".join(f"{_LETTERS[adds]}{number}:{id.hex()}" for adds, number, id in chain)


def decode_chain(text: str) -> Chain:
    """The inverse of ``encode_chain``; raises IncompatibleSnapshot."""
    links: list[Link] = []
    for word in text.split(" "):
        found = _LINK.fullmatch(word)
        if found is None:
            refuse("chain", f"{word[:80]!r} is no link")
        kind: Any = _KINDS[found[1]]
        links.append(Link(kind, int(found[2]), bytes.fromhex(found[3])))
    return tuple(links)
