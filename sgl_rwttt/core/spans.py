"""Which tokens of a context are READ and which are WRITE, as a run-length list."""

from bisect import bisect_right
from collections.abc import Iterator

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import InvalidStateRequest


def check_mode(mode: Effect) -> None:
    """Raise InvalidStateRequest unless `mode` is a token's mode (READ or WRITE)."""
    if mode is not Effect.READ and mode is not Effect.WRITE:
        raise InvalidStateRequest(f"a token is read or write, not {mode!r}")


class ModeSpans:
    """Run-length list of (start, mode) over the tokens of one context."""

    __slots__ = ("_length", "_modes", "_starts")

    def __init__(self, count: int = 0, mode: Effect = Effect.WRITE) -> None:
        self._starts: list[int] = []
        self._modes: list[Effect] = []
        self._length = 0
        self.append(count, mode)

    def append(self, count: int, mode: Effect) -> None:
        """Add `count` tokens of one mode at the end. Raises InvalidStateRequest on CONTROL."""
        check_mode(mode)
        if count < 0:
            raise InvalidStateRequest(f"cannot append {count} tokens")
        if count and (not self._modes or self._modes[-1] is not mode):
            self._starts.append(self._length)
            self._modes.append(mode)
        self._length += count

    def __len__(self) -> int:
        return self._length

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModeSpans) and self._key() == other._key()

    def __repr__(self) -> str:
        return f"ModeSpans({[(a, b, m.value) for a, b, m in self.runs()]})"

    __hash__ = None  # type: ignore[assignment]

    def mode_at(self, index: int) -> Effect:
        """Mode of token `index`; raises IndexError outside [0, len)."""
        if not 0 <= index < self._length:
            raise IndexError(f"token {index} of {self._length}")
        return self._modes[bisect_right(self._starts, index) - 1]

    def slice(self, n: int) -> "ModeSpans":
        """A copy of the first `n` tokens' modes."""
        part = ModeSpans()
        for start, stop, mode in self.runs(0, n):
            part.append(stop - start, mode)
        return part

    def runs(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, int, Effect]]:
        """(first, end, mode) of the maximal runs inside [start, stop), clipped to it."""
        end = self._length if stop is None else stop
        if not 0 <= start <= end <= self._length:
            raise InvalidStateRequest(f"tokens {start}:{end} of {self._length} have no mode")
        i = bisect_right(self._starts, start) - 1
        while start < end:
            last = i + 1 == len(self._starts)
            run_end = end if last else min(end, self._starts[i + 1])
            yield start, run_end, self._modes[i]
            start, i = run_end, i + 1

    @property
    def all_write(self) -> bool:
        """Whether no token is READ."""
        return Effect.READ not in self._modes

    def _key(self) -> tuple[int, list[int], list[Effect]]:
        return self._length, self._starts, self._modes
