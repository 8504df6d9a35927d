"""What a backend needs to know of one owner's tokens in one forward. All slots are plain ints."""

from typing import Literal, NamedTuple

Evidence = Literal["rows", "tokens"]
"""What an update is made from: rows that READ appends to an open page, or the tokens' ids alone."""

DUMMY = 0
"""The reserved slot of every pool: target of padded and non-writing rows, never handed out."""


class BlockPart(NamedTuple):
    """Consecutive rows of a segment with one mode inside one block; all read one version."""

    offset: int  # first row, counted from the segment's start
    count: int  # type: ignore[assignment]  # rows, at least 1
    writes: bool  # WRITE rows: they are evidence and go into `page`
    page: int  # open page: takes the rows when `writes`; DUMMY when a READ finds none open
    row: int  # rows that `page` holds before these
    completes: bool  # the part's last row fills the page
    deferred: bool  # completed by the segment's LAST row: its V is made after the forward
    base: int | None  # dense base that the rows read, None: the model's own weights
    pages: tuple[int, ...]  # pages that the rows read on top of `base`, oldest first
    fold_base: int | None = None  # base slot to fill once this block is complete
    fold_from: tuple[int | None, tuple[int, ...]] = (None, ())  # (base, pages incl. `page`)


class Segment(NamedTuple):
    """One owner's rows of one forward: rows start .. start + count - 1 of the flat batch."""

    start: int  # first row in the flattened batch
    count: int  # type: ignore[assignment]  # rows
    base: int | None  # committed dense base at the segment's start
    pages: tuple[int, ...]  # committed pages on top of `base` at the segment's start
    parts: tuple[BlockPart, ...]  # in order, covering all rows
    evidence: tuple[tuple[int, ...], ...] = ()  # WRITE tokens per block, where they are evidence

    @property
    def blocks(self) -> tuple[BlockPart, ...]:
        """The parts that complete a block, in commit order."""
        return tuple(part for part in self.parts if part.completes)
