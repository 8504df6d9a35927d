"""What the author of a backend implements, so that the conformance suite can drive it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from sgl_rwttt.backends.base import Plan
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.segment import Evidence

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Batch", "Case", "Item", "Plan", "Rows", "SlotKind"]

Item = tuple[int, Effect]
"""A token and the mode it is read in."""

SlotKind = Literal["page", "base"]


class Rows(NamedTuple):
    """One owner's rows of one forward."""

    start: int  # first row in the flat batch
    items: tuple[Item, ...]  # the tokens of its rows
    before: tuple[Item, ...]  # all that the owner read before them, from its start


class Batch(NamedTuple):
    """The rows of one forward; some may belong to no owner."""

    size: int  # N
    rows: tuple[Rows, ...]  # in the order of the plan's segments, anywhere in the batch

    def tokens(self, fill: int = 0) -> list[int]:
        """The token of each of the N rows; ``fill`` where a row has no owner."""
        flat = [fill] * self.size
        for own in self.rows:
            flat[own.start : own.start + len(own.items)] = [token for token, _ in own.items]
        return flat


class Case(Protocol):
    """A small model around a backend, its oracle, and how to break things on purpose.

    Tokens are ids from 0 to ``vocab - 1``; the last one is given to one owner alone, for
    ``spoil``. What a forward answers must depend on the state, on the tokens and on nothing else.
    """

    chunk: int  # C, at least 2; the suite's time grows with it
    evidence: Evidence  # "rows" or "tokens", as the store is told
    vocab: int  # at least 8
    fold_pages: int  # pages that a version reads before it gets a dense base; 0 for never
    tolerance: float  # RMS error of a row of outputs that is allowed, over the RMS of the oracle's

    def make(self, pages: int, bases: int) -> Any:
        """A new backend with its weights set and so many slots, both dummies included."""
        ...

    def forward(self, backend: Any, plan: Any, batch: Batch) -> Tensor:
        """Drive all layers of one forward; one row of outputs [N, ...] per row of the batch."""
        ...

    def oracle(self, tokens: Sequence[int], modes: Sequence[Effect]) -> Tensor:
        """Outputs [n, ...] of one context from its start. Shares no code with the backend."""
        ...

    def poison(self, backend: Any, kind: SlotKind, slot: int) -> None:
        """Fill all memory of a slot with NaN.

        Called for slot 0 too: nothing may depend on a dummy, unless the rule keeps its own start
        in base 0 (then leave that as it is).
        """
        ...

    def spoil(self, backend: Any, token: int) -> AbstractContextManager[object]:
        """Within it, the evidence of every ``token`` holds a NaN, and no other token's does."""
        ...
