"""Cached boundaries of a growing context, so that a waiting prompt is hashed once."""

from array import array
from bisect import bisect_right
from collections.abc import Sequence

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import InvalidStateRequest
from sgl_rwttt.core.lineage import (
    Boundary,
    LineageClock,
    clock_after,
    encode,
    pack,
    state_id_of,
    version_id_of,
)
from sgl_rwttt.core.spans import ModeSpans


class ContextChain:
    """Cached boundaries of one growing context, so that a prompt is hashed once.

    Holds a copy of the tokens (coded with their modes). Every query is about a prefix of them.
    """

    __slots__ = ("_codes", "_ids", "_positions", "_rows", "chunk", "number", "root")

    def __init__(self, root: bytes, chunk: int, number: int = 0) -> None:
        if chunk < 1:
            raise InvalidStateRequest(f"chunk must be at least 1, not {chunk}")
        self.root = root
        self.chunk = chunk
        self.number = number
        self._codes = array("q")
        self._positions = [0]
        self._ids = [root]
        self._rows = 0

    def __len__(self) -> int:
        return len(self._codes)

    def extend(self, tokens: Sequence[int], mode: Effect) -> None:
        """Append tokens of one mode, hashing the blocks that they complete."""
        if mode is Effect.READ:
            self._codes.extend(encode(tokens, mode))
            return
        end = len(self._codes) + self.chunk - self._rows
        self._codes.extend(encode(tokens, mode))
        self._rows += len(tokens)
        while self._rows >= self.chunk:
            codes = pack(self._codes[self._positions[-1] : end])
            self._ids.append(version_id_of(self._ids[-1], codes))
            self._positions.append(end)
            self._rows -= self.chunk
            end += self.chunk

    def sync(self, tokens: Sequence[int], spans: ModeSpans, length: int | None = None) -> None:
        """Append tokens[len(self) : length]; the caller vouches that the prefix is the same."""
        stop = len(tokens) if length is None else length
        if stop > len(self):
            for a, b, mode in spans.runs(len(self), stop):
                self.extend(tokens[a:b], mode)

    @property
    def count(self) -> int:
        """Number of boundaries, the root included."""
        return len(self._positions)

    def boundary(self, index: int) -> Boundary:
        """Boundary `index`; 0 is the root at position 0."""
        return Boundary(self._positions[index], self._ids[index], self.number + index)

    def index_at(self, limit: int) -> int:
        """Index of the deepest boundary at a position <= limit."""
        return bisect_right(self._positions, limit) - 1

    def boundaries(self, limit: int) -> list[Boundary]:
        """All boundaries at positions <= limit, the root first."""
        return [self.boundary(i) for i in range(self.index_at(limit) + 1)]

    def version_id(self, index: int) -> bytes:
        """Version id of boundary `index`."""
        return self._ids[index]

    def codes_between(self, start: int, stop: int) -> bytes:
        """Items of tokens start .. stop - 1, 8 bytes each."""
        return pack(self._codes[start:stop])

    def items_after(self, index: int, limit: int) -> bytes:
        """Items from boundary `index` to position `limit`, 8 bytes each."""
        return self.codes_between(self._positions[index], limit)

    def state_id_at(self, n: int) -> bytes:
        """State id after the first `n` tokens; raises InvalidStateRequest beyond the end."""
        if not 0 <= n <= len(self):
            raise InvalidStateRequest(f"position {n} is outside 0..{len(self)}")
        index = self.index_at(n)
        return state_id_of(self._ids[index], self.items_after(index, n))

    def clock_at(self, n: int) -> LineageClock:
        """A clock standing after the first `n` tokens."""
        if not 0 <= n <= len(self):
            raise InvalidStateRequest(f"position {n} is outside 0..{len(self)}")
        index = self.index_at(n)
        position, version_id, number = self.boundary(index)
        return clock_after(self.root, self.chunk, version_id, number, self._codes[position:n], n)
