"""Which rows of a batch read which page rows and bases, merged into few large products."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")


class ReadPart(NamedTuple):
    """Adjacent batch rows that read one and the same version."""

    start: int  # first row in the batch
    rows: int  # how many
    base: int | None  # slot of the dense base, None for the shared W_0 alone
    pages: tuple[int, ...]  # committed pages since the base, oldest first


class ReadGroup(NamedTuple):
    """One set of batch rows and everything that exactly these rows read."""

    rows: tuple[tuple[int, int], ...]  # [first, end) batch rows, ascending
    bases: tuple[int, ...]  # base slots
    runs: tuple[tuple[int, int], ...]  # [first, end) rows of the page pools


@dataclass(frozen=True, eq=False)
class ReadPlan:
    """What one forward pass reads: valid for every layer, and as long as nothing in it changes."""

    groups: tuple[ReadGroup, ...]
    chunk: int  # rows per page
    device: torch.device
    _prepared: dict[Any, Any] = field(default_factory=dict, repr=False)

    def prepared(self, build: Callable[[ReadPlan], T]) -> T:
        """Return ``build(self)``, made on the first call: the tables of one implementation."""
        if build not in self._prepared:
            self._prepared[build] = build(self)
        result: T = self._prepared[build]
        return result


@dataclass(slots=True)
class _Draft:
    bases: list[int] = field(default_factory=list)
    runs: list[tuple[int, int]] = field(default_factory=list)


def plan_read(segments: Sequence[Sequence[ReadPart]], chunk: int, device: torch.device) -> ReadPlan:
    """Group the parts of ``segments`` by what they read; pages hold ``chunk`` rows each.

    The parts of one segment are adjacent rows of one owner, whose versions usually grow from part
    to part. What all of them read is merged with what other segments read: consecutive page slots
    with the same readers become one run. The rest of a segment is halved again and again, so that
    many new pages read by many later rows become few large products. One row's sum always runs
    oldest first. Parts without rows, or with nothing to read, are left out.
    """
    live = [parts for segment in segments if (parts := [part for part in segment if part.rows])]
    common = [_common(parts) for parts in live]
    groups = list(_merged(common, chunk))
    for parts, part in zip(live, common, strict=True):
        if len(parts) > 1:
            groups += _nested(parts, part.base, len(part.pages), chunk)
    return ReadPlan(tuple(groups), chunk, device)


def levels(groups: Iterable[ReadGroup]) -> list[int]:
    """Per group, how many earlier groups have to be added before it, because they share rows.

    Groups of one level have disjoint rows, and adding level by level keeps each row's order.
    """
    deepest: dict[int, int] = {}
    result = []
    for group in groups:
        rows = [row for first, end in group.rows for row in range(first, end)]
        level = 1 + max((deepest.get(row, -1) for row in rows), default=-1)
        deepest.update(dict.fromkeys(rows, level))
        result.append(level)
    return result


def _common(parts: Sequence[ReadPart]) -> ReadPart:
    """All rows of ``parts``, with the base and the first pages that every part reads."""
    first, last = parts[0], parts[-1]
    if len(parts) == 1:
        return first
    rows = last.start + last.rows - first.start
    if any(part.base != first.base for part in parts):
        return ReadPart(first.start, rows, None, ())
    low, high = min(part.pages for part in parts), max(part.pages for part in parts)
    shared = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))
    return ReadPart(first.start, rows, first.base, low[:shared])


def _nested(
    parts: Sequence[ReadPart], base: int | None, skip: int, chunk: int
) -> Iterator[ReadGroup]:
    """Groups of what ``parts`` read beyond ``base`` and the first ``skip`` pages."""
    half = len(parts) // 2
    for side in (parts[:half], parts[half:]):
        part = _common(side)
        bases = () if part.base is None or part.base == base else (part.base,)
        runs = merge_ranges((page * chunk, (page + 1) * chunk) for page in part.pages[skip:])
        if bases or runs:
            yield ReadGroup(((part.start, part.start + part.rows),), bases, tuple(runs))
        if len(side) > 1:
            yield from _nested(side, part.base, len(part.pages), chunk)


def _merged(parts: Sequence[ReadPart], chunk: int) -> Iterator[ReadGroup]:
    bases, pages = _readers(parts)
    drafts: dict[int, _Draft] = {}
    for slot, mask in bases.items():
        drafts.setdefault(mask, _Draft()).bases.append(slot)
    for first, count, mask in _runs(parts, pages):
        run = (first * chunk, (first + count) * chunk)
        drafts.setdefault(mask, _Draft()).runs.append(run)
    for mask, draft in drafts.items():
        yield ReadGroup(_rows(parts, mask), tuple(draft.bases), tuple(draft.runs))


def _readers(parts: Sequence[ReadPart]) -> tuple[dict[int, int], dict[int, int]]:
    """Base slot -> reading parts and page -> reading parts, each set as a bit mask."""
    bases: dict[int, int] = {}
    pages: dict[int, int] = {}
    for index, part in enumerate(parts):
        bit = 1 << index
        if part.base is not None:
            bases[part.base] = bases.get(part.base, 0) | bit
        for page in part.pages:
            pages[page] = pages.get(page, 0) | bit
    return bases, pages


def _runs(parts: Sequence[ReadPart], readers: dict[int, int]) -> Iterator[tuple[int, int, int]]:
    """(first page, number of pages, readers) of every maximal run, each page exactly once."""
    left = dict(readers)
    for part in parts:
        run: tuple[int, int, int] | None = None
        for page in part.pages:
            mask = left.pop(page, None)
            if mask is None:
                continue
            if run and page == run[0] + run[1] and mask == run[2]:
                run = (run[0], run[1] + 1, mask)
                continue
            if run:
                yield run
            run = (page, 1, mask)
        if run:
            yield run


def _rows(parts: Sequence[ReadPart], mask: int) -> tuple[tuple[int, int], ...]:
    readers = sorted(part for index, part in enumerate(parts) if mask >> index & 1)
    return tuple(merge_ranges((part.start, part.start + part.rows) for part in readers))


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join [first, end) ranges where one ends at the start of the next; order is kept."""
    merged: list[tuple[int, int]] = []
    for first, end in ranges:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((first, end))
    return merged
