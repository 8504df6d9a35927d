"""Identity of a point in a lineage: ids chained over (token, mode), the same on both sides.

State is a pure function of (model fingerprint, rule, root, tokens with their modes), so every
point has an id computed from exactly these. Server and client compute it independently.

    root id          H("r", fingerprint, rule)
    cleared root id  H("c", version id)             context reset at a committed version
    version id       H("v", previous version id, items of the block)
    state id         the version id when no items follow it, else H("t", version id, items)

H is blake2b with 16 bytes. Items are all tokens since the last boundary, READ tokens included
(later KV and rows depend on them), each coded as 2 * token + (1 if WRITE) in 8 bytes, little
endian. A boundary falls after every `chunk`-th WRITE token of the context.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import InvalidStateRequest
from sgl_rwttt.core.spans import ModeSpans, check_mode

__all__ = [
    "Boundary",
    "LineageClock",
    "ModeSpans",
    "cleared_root_id",
    "clock_after",
    "count_writes",
    "encode",
    "pack",
    "root_id",
    "state_id_of",
    "tail_key_of",
    "version_id_of",
    "write_flags",
]

ID_BYTES = 16
_WRITE_CODES = bytes(i & 1 for i in range(256))


def root_id(fingerprint: str, rule: str) -> bytes:
    """Id of a model's default root: no evidence yet."""
    first, second = fingerprint.encode(), rule.encode()
    return _digest(b"r" + len(first).to_bytes(8, "little") + first + second)


def cleared_root_id(version_id: bytes) -> bytes:
    """Id of the root left by a context reset at a committed version (its tail is dropped)."""
    return _digest(b"c" + version_id)


class Boundary(NamedTuple):
    """A committed point of a context."""

    position: int  # tokens of the context up to and including the completing one
    version_id: bytes
    number: int  # version number


class LineageClock:
    """The moving end of one context: position, version, items since the last boundary."""

    __slots__ = ("_codes", "chunk", "number", "position", "root", "rows", "version_id")

    def __init__(self, root: bytes, chunk: int, number: int = 0) -> None:
        """Start at `root`, whose version number is `number`; `chunk` WRITE tokens per block."""
        if chunk < 1:
            raise InvalidStateRequest(f"chunk must be at least 1, not {chunk}")
        self.root = root
        self.chunk = chunk
        self.number = number
        self.position = 0
        self.rows = 0
        self.version_id = root
        self._codes = array("q")

    def push(self, tokens: Sequence[int], mode: Effect) -> list[Boundary]:
        """Append tokens of one mode; returns the boundaries passed, in order."""
        return self.push_codes(encode(tokens, mode), mode)

    def push_codes(self, codes: "array[int]", mode: Effect) -> list[Boundary]:
        """`push` for items that `encode` made of tokens of that one mode; cannot fail."""
        if mode is Effect.READ:
            self._codes.extend(codes)
            self.position += len(codes)
            return []
        passed: list[Boundary] = []
        done, count = 0, len(codes)
        while done < count:
            take = min(self.chunk - self.rows, count - done)
            self._codes.extend(codes[done : done + take] if take < count else codes)
            self.rows += take
            self.position += take
            done += take
            if self.rows == self.chunk:
                passed.append(self._close())
        return passed

    def _close(self) -> Boundary:
        self.version_id = version_id_of(self.version_id, pack(self._codes))
        self.number += 1
        self.rows = 0
        del self._codes[:]
        return Boundary(self.position, self.version_id, self.number)

    @property
    def codes(self) -> bytes:
        """The items since the boundary, 8 bytes each (see the module's text)."""
        return pack(self._codes)

    @property
    def write_tokens(self) -> tuple[int, ...]:
        """The WRITE tokens since the last boundary."""
        return tuple([c >> 1 for c in self._codes if c & 1])

    @property
    def items(self) -> tuple[tuple[int, Effect], ...]:
        """(token, mode) of every token since the last boundary."""
        return tuple((c >> 1, Effect.WRITE if c & 1 else Effect.READ) for c in self._codes)

    @property
    def state_id(self) -> bytes:
        """Id of the present point; costs one hash over the items."""
        return state_id_of(self.version_id, pack(self._codes))

    def copy(self) -> "LineageClock":
        """An independent clock at the same point."""
        other = LineageClock(self.root, self.chunk, self.number)
        other.position, other.rows, other.version_id = self.position, self.rows, self.version_id
        other._codes = self._codes[:]
        return other


def clock_after(
    root: bytes, chunk: int, version_id: bytes, number: int, codes: "array[int]", position: int
) -> LineageClock:
    """A clock at `position`, `codes` after the boundary of `version_id` (fewer than chunk rows)."""
    clock = LineageClock(root, chunk, number)
    clock.version_id, clock.position, clock._codes = version_id, position, codes
    clock.rows = count_writes(pack(codes))
    return clock


def version_id_of(previous: bytes, codes: bytes) -> bytes:
    """Id of the version that a complete block of items makes out of `previous`."""
    return _digest(b"v" + previous + codes)


def state_id_of(version_id: bytes, codes: bytes) -> bytes:
    """Id of the point `codes` after the boundary of `version_id`."""
    return _digest(b"t" + version_id + codes) if codes else version_id


def encode(tokens: Sequence[int], mode: Effect) -> "array[int]":
    """Item codes of tokens of one mode. Raises InvalidStateRequest for anything but token ids."""
    check_mode(mode)
    flag = 1 if mode is Effect.WRITE else 0
    try:
        return array("q", [2 * token + flag for token in tokens])
    except (TypeError, OverflowError) as error:
        raise InvalidStateRequest(f"not a list of token ids: {error}") from None


def pack(codes: "array[int]") -> bytes:
    """Item codes as bytes, little endian on every machine."""
    if sys.byteorder == "big":
        codes = codes[:]
        codes.byteswap()
    return codes.tobytes()


def write_flags(codes: bytes) -> bytes:
    """One byte per item, 1 where it is a WRITE token."""
    return codes[::8].translate(_WRITE_CODES)


def tail_key_of(codes: bytes) -> bytes:
    """The items up to the last WRITE token: what the rows of a retained tail are a function of."""
    return codes[: 8 * (write_flags(codes).rfind(1) + 1)]


def count_writes(codes: bytes) -> int:
    """WRITE tokens among the items."""
    return write_flags(codes).count(1)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=ID_BYTES).digest()
