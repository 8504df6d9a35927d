"""Which rows of a batch read which page rows and bases, merged into few large products."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class ReadPart(NamedTuple):
    """Adjacent batch rows that read one and the same version."""

    start: int  # first row in the batch
    rows: int  # how many
    base: int | None  # slot of the dense base, None for the shared W_0 alone
    pages: tuple[int, ...]  # committed pages since the base, oldest first


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """One set of batch rows and everything that exactly these rows read."""

    rows: slice | Tensor  # a slice where the rows are contiguous, else an int64 index tensor
    bases: tuple[int, ...]  # base slots
    runs: tuple[tuple[int, int], ...]  # [first, end) rows of the page pools


ReadPlan = tuple[ReadGroup, ...]


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
    plan = list(_merged(common, chunk, device))
    for parts, part in zip(live, common, strict=True):
        if len(parts) > 1:
            plan += _nested(parts, part.base, len(part.pages), chunk)
    return tuple(plan)


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
            yield ReadGroup(slice(part.start, part.start + part.rows), bases, tuple(runs))
        if len(side) > 1:
            yield from _nested(side, part.base, len(part.pages), chunk)


def _merged(parts: Sequence[ReadPart], chunk: int, device: torch.device) -> Iterator[ReadGroup]:
    bases, pages = _readers(parts)
    drafts: dict[int, _Draft] = {}
    for slot, mask in bases.items():
        drafts.setdefault(mask, _Draft()).bases.append(slot)
    for first, count, mask in _runs(parts, pages):
        run = (first * chunk, (first + count) * chunk)
        drafts.setdefault(mask, _Draft()).runs.append(run)
    for mask, draft in drafts.items():
        yield ReadGroup(_rows(parts, mask, device), tuple(draft.bases), tuple(draft.runs))


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


def _rows(parts: Sequence[ReadPart], mask: int, device: torch.device) -> slice | Tensor:
    ranges = merge_ranges(
        (part.start, part.start + part.rows)
        for index, part in enumerate(parts)
        if mask >> index & 1
    )
    if len(ranges) == 1:
        return slice(*ranges[0])
    rows = [row for first, end in ranges for row in range(first, end)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join [first, end) ranges where one ends at the start of the next; order is kept."""
    merged: list[tuple[int, int]] = []
    for first, end in ranges:
        if merged and merged[-1][1] == first:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((first, end))
    return merged
