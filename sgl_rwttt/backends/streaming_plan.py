"""One forward pass of the TTT-Linear rule, planned: rounds of one mini-batch per owner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.backends.in_place_plan import Block, check_segments

if TYPE_CHECKING:
    from sgl_rwttt.core.segment import BlockPart, Segment


class Piece(NamedTuple):
    """Consecutive tokens of one owner inside one mini-batch."""

    segment: int  # index of its segment
    start: int  # first row of the flat batch
    count: int  # type: ignore[assignment]  # 1 .. chunk
    page: int  # the open page: holds `row` earlier tokens
    row: int
    writes: bool
    completes: bool  # and later pieces of the segment read what it completes
    fold: int | None  # base slot for the completed state


@dataclass(slots=True)
class Round:
    """At most one piece of each segment: what one call of the kernel answers."""

    segments: Tensor  # [G] int64
    whole: bool  # these are all segments, in order
    rows: Tensor  # [G, c] rows of the flat batch; padded with the piece's last row
    valid: Tensor  # [G, c] bool, False where padded
    offsets: Tensor  # [G, c] offset of each token in the mini-batch
    pages: Tensor  # [G]
    held: Tensor  # [G] rows of the page before the piece
    empty: bool  # no page of the round holds any
    reading: Tensor  # [G] bool: READ tokens, which see each other not
    target: Tensor  # pool rows that the WRITE tokens go to ...
    picks: Tensor  # ... and their places in [G * c]
    closing: Tensor  # [n] places in [G] whose mini-batch is completed here
    folds: tuple[tuple[int, int], ...]  # (place among the closing, base slot)


class Versions(NamedTuple):
    """Where the states of some versions are found."""

    bases: Tensor  # [S], 0 for the model's own
    chains: tuple[tuple[Tensor, Tensor], ...]  # per page age: (places in [S], their pages)

    @classmethod
    def of(
        cls, versions: Sequence[tuple[int | None, tuple[int, ...]]], device: torch.device
    ) -> Versions:
        """From (base, pages on top of it, oldest first)."""
        depth = max((len(pages) for _, pages in versions), default=0)
        chains = []
        for age in range(depth):
            own = [i for i, (_, pages) in enumerate(versions) if age < len(pages)]
            pages = [versions[i][1][age] for i in own]
            chains.append((_ints(own, device), _ints(pages, device)))
        return cls(_ints([base or 0 for base, _ in versions], device), tuple(chains))


@dataclass(slots=True)
class StreamingPlan:
    """Built once per forward, used by every layer; not reusable."""

    segments: tuple[Segment, ...]
    reads: Versions  # the versions at the segments' starts
    rounds: tuple[Round, ...]
    offsets: Tensor  # [rows] offset in the mini-batch of each row of a segment, in `order`
    order: Tensor  # [rows] rows of the flat batch that belong to a segment
    source: Tensor  # [rows written] rows of the flat batch ...
    target: Tensor  # ... and the pool rows they go to
    memory: Tensor  # [S * M] rows of X before each segment
    windows: Tensor  # [rows, M] places in (memory rows, flat rows) before each row of `order`
    blocks: tuple[tuple[Block, BlockPart], ...]  # all completed mini-batches
    layers_done: set[int] = field(default_factory=set)
    finished: bool = False
    written: set[Block] = field(default_factory=set)
    retried: int = 0  # blocks that were computed once more, each alone
    failed: dict[int, str] = field(default_factory=dict)  # segment -> what its write raised twice

    def unchanged_pages(self, segment: int) -> tuple[int, ...]:
        """Every complete mini-batch changes the state."""
        return ()

    def written_pages(self, segment: int) -> tuple[int, ...]:
        """Pages that ``finish_step`` found complete and finite, in order, for one segment."""
        return tuple(b.page for b, _ in self.blocks if b.segment == segment and b in self.written)


def plan_streaming(
    segments: tuple[Segment, ...],
    memory_rows: Sequence[Sequence[int]],
    pages: int,
    chunk: int,
    device: torch.device,
) -> StreamingPlan:
    """Plan ``segments``; ``memory_rows`` are the M rows of X before each of them.

    Raises ValueError when parts do not tile their segment, when a part would write outside the
    pool, into the dummy page 0 or past its page, or when two segments write one page.
    """
    check_segments(segments, pages, chunk)
    pieces = [list(_pieces(i, segment, chunk)) for i, segment in enumerate(segments)]
    depth = max((len(own) for own in pieces), default=0)
    rounds = tuple(
        _round([own[j] for own in pieces if j < len(own)], len(segments), chunk, device)
        for j in range(depth)
    )
    flat = [piece for own in pieces for piece in own]
    order = [row for p in flat for row in range(p.start, p.start + p.count)]
    offsets = [p.row + i * p.writes for p in flat for i in range(p.count)]
    writing = [p for p in flat if p.writes]

    ints = partial(_ints, device=device)
    return StreamingPlan(
        segments=segments,
        reads=Versions.of([(s.base, s.pages) for s in segments], device),
        rounds=rounds,
        offsets=ints(offsets),
        order=ints(order),
        source=ints([row for p in writing for row in range(p.start, p.start + p.count)]),
        target=ints([p.page * chunk + p.row + i for p in writing for i in range(p.count)]),
        memory=ints([row for rows in memory_rows for row in rows]),
        windows=ints(_windows(pieces, memory_rows)),
        blocks=tuple(
            (Block(i, part.page), part)
            for i, segment in enumerate(segments)
            for part in segment.blocks
        ),
    )


def _pieces(index: int, segment: Segment, chunk: int) -> Iterator[Piece]:
    """The parts of a segment; long runs of READ tokens are cut to mini-batches."""
    for part in segment.parts:
        start = segment.start + part.offset
        if part.writes:
            inner = part.completes and not part.deferred
            fold = part.fold_base if inner else None
            yield Piece(index, start, part.count, part.page, part.row, True, inner, fold)
            continue
        for first in range(0, part.count, chunk):
            count = min(chunk, part.count - first)
            yield Piece(index, start + first, count, part.page, part.row, False, False, None)


def _round(pieces: list[Piece], total: int, chunk: int, device: torch.device) -> Round:
    width = max(p.count for p in pieces)
    span = range(width)
    closing = [place for place, p in enumerate(pieces) if p.completes]
    written = [
        (place * width + i, p.page * chunk + p.row + i)
        for place, p in enumerate(pieces)
        if p.writes
        for i in range(p.count)
    ]

    tensor = partial(_ints, device=device)
    return Round(
        segments=tensor([p.segment for p in pieces]),
        whole=len(pieces) == total,
        rows=tensor([[p.start + min(i, p.count - 1) for i in span] for p in pieces]),
        valid=tensor([[i < p.count for i in span] for p in pieces]).bool(),
        offsets=tensor([[p.row + min(i, p.count - 1) * p.writes for i in span] for p in pieces]),
        pages=tensor([p.page for p in pieces]),
        held=tensor([p.row for p in pieces]),
        empty=all(p.row == 0 for p in pieces),
        reading=tensor([not p.writes for p in pieces]).bool(),
        target=tensor([row for _, row in written]),
        picks=tensor([place for place, _ in written]),
        closing=tensor(closing),
        folds=tuple(
            (i, fold) for i, place in enumerate(closing) if (fold := pieces[place].fold) is not None
        ),
    )


def _windows(pieces: list[list[Piece]], memory_rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Per row: the places of its last M convolution inputs; READ rows leave none."""
    width = len(memory_rows[0]) if memory_rows else 0
    before = sum(len(rows) for rows in memory_rows)
    table: list[list[int]] = []
    for index, own in enumerate(pieces):
        seen = list(range(index * width, (index + 1) * width))
        for piece in own:
            for row in range(piece.start, piece.start + piece.count):
                table.append(seen[len(seen) - width :])
                if piece.writes:
                    seen.append(before + row)
    return table


def _ints(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
