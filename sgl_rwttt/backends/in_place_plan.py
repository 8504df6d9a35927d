"""One forward pass of the In-Place rule, planned: what is read, appended, written and folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch

from sgl_rwttt.kernels.apply_state.plan import ReadPart, ReadPlan, merge_ranges
from sgl_rwttt.kernels.tail_append.plan import AppendPlan, plan_append

if TYPE_CHECKING:
    from sgl_rwttt.core.segment import BlockPart, Segment


class Block(NamedTuple):
    """A chunk that this forward completes."""

    segment: int  # index of its segment
    page: int


class Fold(NamedTuple):
    """A base to fill: ``dst`` from base ``src`` and ``runs`` of page rows, oldest first."""

    segment: int
    src: int | None
    dst: int
    runs: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class StepPlan:
    """Built once per forward, used by every state layer; not reusable."""

    segments: tuple[Segment, ...]
    read: ReadPlan
    append: AppendPlan
    inner: tuple[Block, ...]  # completed before their segment's end: written inside the layer
    inner_pages: torch.Tensor  # int64, pages of ``inner``
    inner_folds: tuple[Fold, ...]  # in order: a later one may start from an earlier one
    deferred: tuple[Block, ...]  # completed by their segment's last token: written afterwards
    deferred_folds: tuple[Fold, ...]
    layers_done: set[int] = field(default_factory=set)
    finished: bool = False
    written: set[Block] = field(default_factory=set)  # blocks whose V stands, all layers
    retried: int = 0  # blocks that were computed once more, each alone
    failed: dict[int, str] = field(default_factory=dict)  # segment -> what its write raised twice

    def unchanged_pages(self, segment: int) -> tuple[int, ...]:
        """Every complete block changes the state."""
        return ()

    def written_pages(self, segment: int) -> tuple[int, ...]:
        """Pages that ``finish_step`` found complete and finite, in order, for one segment."""
        blocks = self.inner + self.deferred
        return tuple(b.page for b in blocks if b.segment == segment and b in self.written)


def read_parts(segments: Sequence[Segment]) -> tuple[tuple[ReadPart, ...], ...]:
    """The rows of each segment by the version they read."""
    return tuple(
        tuple(
            ReadPart(segment.start + part.offset, part.count, part.base, part.pages)
            for part in segment.parts
        )
        for segment in segments
    )


def plan_step(
    segments: tuple[Segment, ...], read: ReadPlan, pages: int, chunk: int, device: torch.device
) -> StepPlan:
    """Plan the writes of ``segments`` and join them with the ``read`` plan.

    Raises ValueError when parts do not tile their segment, when a part would write outside the
    pool, into the dummy page 0 or past its page, or when two segments write one page.
    """
    check_segments(segments, pages, chunk)
    blocks = list(_completed(segments))
    inner = tuple(Block(i, part.page) for i, part in blocks if not part.deferred)
    folds = [
        (part, Fold(i, part.fold_from[0], part.fold_base, page_runs(part.fold_from[1], chunk)))
        for i, part in blocks
        if part.fold_base is not None
    ]
    return StepPlan(
        segments=segments,
        read=read,
        append=plan_append(list(_stretches(segments, chunk)), device),
        inner=inner,
        inner_pages=torch.tensor([b.page for b in inner], dtype=torch.int64, device=device),
        inner_folds=tuple(fold for part, fold in folds if not part.deferred),
        deferred=tuple(Block(i, part.page) for i, part in blocks if part.deferred),
        deferred_folds=tuple(fold for part, fold in folds if part.deferred),
    )


def page_runs(pages: Sequence[int], chunk: int) -> tuple[tuple[int, int], ...]:
    """[first, end) pool rows of ``pages``, consecutive slots joined, order kept."""
    return tuple(merge_ranges((page * chunk, (page + 1) * chunk) for page in pages))


def _completed(segments: Sequence[Segment]) -> Iterator[tuple[int, BlockPart]]:
    for index, segment in enumerate(segments):
        for part in segment.parts:
            if part.completes:
                yield index, part


def _stretches(segments: Sequence[Segment], chunk: int) -> Iterator[tuple[int, int, int]]:
    for segment in segments:
        for part in segment.parts:
            if part.writes and part.count:
                yield segment.start + part.offset, part.page * chunk + part.row, part.count


def check_segments(segments: Sequence[Segment], pages: int, chunk: int) -> None:
    """As `plan_step` raises."""
    writer: dict[int, int] = {}
    for index, segment in enumerate(segments):
        end = 0
        for part in segment.parts:
            if part.offset != end:
                raise ValueError(f"segment {index}: a part starts at {part.offset}, not at {end}")
            end += part.count
            if not part.writes:
                continue
            if not 0 < part.page < pages or not 0 <= part.row <= chunk - part.count:
                raise ValueError(
                    f"segment {index}: cannot write {part.count} rows at row {part.row} of page "
                    f"{part.page} (pages 1 to {pages - 1}, {chunk} rows each)"
                )
            if writer.setdefault(part.page, index) != index:
                raise ValueError(
                    f"segments {writer[part.page]} and {index} both write page {part.page}"
                )
        if end != segment.count:
            raise ValueError(f"segment {index}: parts cover {end} of {segment.count} rows")
