"""An owner's uncommitted transition: the plan of n new tokens and the slots it took for them."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import SlotError, StaleVersion
from sgl_rwttt.core.segment import DUMMY, BlockPart, Segment

if TYPE_CHECKING:
    from sgl_rwttt.core.owners import OwnerState


Runs = list[tuple["array[int]", Effect]]
"""The new tokens as runs of one mode: (item codes, mode)."""

_UNPLANNED = Segment(0, 0, None, (), ())


@dataclass(frozen=True, slots=True)
class Block:
    """One block that a candidate completes."""

    page: int
    base: int | None  # slot of its fold; None when it is not folded
    in_place: bool  # the page is the owner's open page, not a fresh one


class Candidate:
    """A dirty version in the making: invisible to every READ but its own segment's.

    `segment` is for the backend; `mark_written` is the backend's word that a completed block
    holds its V. Closed by the store's commit or drop.
    """

    __slots__ = (
        "bases",
        "blocks",
        "generation",
        "is_open",
        "kept",
        "pages",
        "position",
        "runs",
        "segment",
        "state",
        "tail_page",
        "tail_rows",
        "version",
        "written",
    )

    def __init__(self, state: "OwnerState", runs: Runs) -> None:
        self.state = state
        self.generation = state.generation
        self.version = state.version  # expected at commit
        self.position = state.clock.position  # expected at commit
        self.runs = runs
        self.segment = _UNPLANNED
        self.blocks: list[Block] = []
        self.tail_page: int | None = None  # fresh page of the rows left open at the end
        self.tail_rows = 0  # rows open at the end
        self.pages: list[int] = []  # fresh slots, given back by drop
        self.bases: list[int] = []
        self.written: set[int] = set()
        self.kept: set[int] = set()  # pages of blocks that changed nothing
        self.is_open = True

    def mark_written(self, page: int, changed: bool = True) -> None:
        """Record that the block in `page` holds its V (and its fold base is filled).

        Not `changed`: the update left the state as it was, nothing is in the page, and the version
        will share what its predecessor reads.
        Raises StaleVersion after commit, drop or release, SlotError for a foreign page.
        """
        if not self.is_open:
            raise StaleVersion(
                f"a late write to page {page}: the candidate is closed", **self.state.names
            )
        if all(block.page != page for block in self.blocks):
            raise SlotError(f"page {page} is no completed block of this candidate")
        self.written.add(page)
        if not changed:
            self.kept.add(page)

    @property
    def unwritten(self) -> list[int]:
        """Pages of completed blocks without a `mark_written`."""
        return [block.page for block in self.blocks if block.page not in self.written]


class BlockWalk:
    """Cuts n new tokens into parts, taking pages and fold bases on the way.

    `take_page` may not fail (the caller reserved the pages); `take_base` returns None when no
    base can be had.
    """

    def __init__(
        self,
        candidate: Candidate,
        chunk: int,
        fold_pages: int,
        take_page: Callable[[int | None], int],
        take_base: Callable[[], int | None],
    ) -> None:
        state = candidate.state
        self.candidate = candidate
        self.chunk = chunk
        self.fold_pages = fold_pages
        self.take_page = take_page
        self.take_base = take_base
        self.base = state.version.base
        self.pages = state.version.pages
        self.rows = state.clock.rows
        self.parts: list[BlockPart] = []
        self.page: int | None = None
        self.in_place = False

    def open_page(self, page: int, in_place: bool) -> None:
        """Continue in a page that holds the carried rows."""
        self.page, self.in_place = page, in_place

    def read(self, offset: int, count: int) -> None:
        """Add READ rows."""
        page = DUMMY if self.page is None else self.page
        self.parts.append(
            BlockPart(offset, count, False, page, self.rows, False, False, self.base, self.pages)
        )

    def write(self, offset: int, count: int, total: int) -> None:
        """Add WRITE rows, one part per block."""
        end = offset + count
        while offset < end:
            take = min(self.chunk - self.rows, end - offset)
            offset += take
            self._part(offset - take, take, deferred=offset == total)

    def _part(self, offset: int, count: int, deferred: bool) -> None:
        if self.page is None:
            self.page = self.take_page(self.pages[-1] if self.pages else None)
            self.candidate.pages.append(self.page)
            self.in_place = False
        page, row, base, pages = self.page, self.rows, self.base, self.pages
        self.rows += count
        completes = self.rows == self.chunk
        fold_base, fold_from = self._complete(page) if completes else (None, (None, ()))
        self.parts.append(
            BlockPart(
                offset,
                count,
                True,
                page,
                row,
                completes,
                completes and deferred,
                base,
                pages,
                fold_base,
                fold_from,
            )
        )

    def _complete(self, page: int) -> tuple[int | None, tuple[int | None, tuple[int, ...]]]:
        fold_from = (self.base, (*self.pages, page))
        fold = 0 < self.fold_pages <= len(fold_from[1])
        fold_base = self.take_base() if fold else None
        self.candidate.blocks.append(Block(page, fold_base, self.in_place))
        self.rows, self.page = 0, None
        if fold_base is None:
            self.pages = fold_from[1]
            return None, (None, ())
        self.candidate.bases.append(fold_base)
        self.base, self.pages = fold_base, ()
        return fold_base, fold_from
