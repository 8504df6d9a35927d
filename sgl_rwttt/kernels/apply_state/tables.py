"""A read plan for the GPU: flat index tables, copied to the device in one piece.

Groups of one level have disjoint rows, so each level is two launches: the scores h H^T of all its
groups, then the sums over their page rows. Groups of few rows (decode) and of many (prefill) are
launched apart, with other tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from sgl_rwttt.kernels.apply_state.plan import ReadGroup, ReadPlan, levels
from sgl_rwttt.kernels.host import device_table


class Tiles(NamedTuple):
    """Rows that one program takes."""

    batch: int  # batch rows
    pages: int  # page rows, when scores are made


FEW = Tiles(batch=16, pages=32)
MANY = Tiles(batch=64, pages=64)


class Launch(NamedTuple):
    """One level's groups of few or many rows. All tables are int64 on the device."""

    tiles: Tiles
    scores: int  # numbers of all groups' scores
    groups: Tensor  # [G, 5]: first of its rows, rows, first of its page rows, page rows, scores
    rows: Tensor  # batch rows, group by group
    pages: Tensor  # pool rows, group by group, oldest first
    score_tiles: Tensor  # [n, 3]: group, first row in it, first page row in it
    row_tiles: Tensor  # [m, 2]: group, first row in it


class Dense(NamedTuple):
    """Rows that read a dense base; a row has one at most."""

    rows: Tensor  # batch rows
    tiles: Tensor  # [n, 3]: first of its rows, rows, base slot


class ReadTables(NamedTuple):
    """Launches in order: the bases, then level by level."""

    dense: Dense | None
    launches: tuple[Launch, ...]


class _Writer:
    """Collects tables, then makes them views of one device tensor."""

    def __init__(self) -> None:
        self._values: list[int] = []
        self._spans: list[tuple[int, int]] = []

    def add(self, values: Sequence[int]) -> int:
        self._spans.append((len(self._values), len(self._values) + len(values)))
        self._values += values
        return len(self._spans) - 1

    def finish(self, plan: ReadPlan) -> list[Tensor]:
        table = device_table(self._values, plan.device)
        return [table[first:end] for first, end in self._spans]


def make_tables(plan: ReadPlan) -> ReadTables:
    """Tables of ``plan``; pass it to ``ReadPlan.prepared``. Waits for nothing on the device."""
    writer = _Writer()
    dense = _dense(writer, [group for group in plan.groups if group.bases])
    drafts = [_launch(writer, groups, tiles) for groups, tiles in _by_level(plan.groups)]
    tables = writer.finish(plan)
    launches = tuple(
        Launch(tiles, scores, *(tables[i] for i in parts)) for tiles, scores, parts in drafts
    )
    return ReadTables(Dense(*(tables[i] for i in dense)) if dense else None, launches)


def _by_level(groups: Sequence[ReadGroup]) -> list[tuple[list[ReadGroup], Tiles]]:
    classes: dict[tuple[int, Tiles], list[ReadGroup]] = {}
    for level, group in zip(levels(groups), groups, strict=True):
        if group.runs:
            tiles = FEW if _count(group.rows) <= FEW.batch else MANY
            classes.setdefault((level, tiles), []).append(group)
    return [(classes[key], key[1]) for key in sorted(classes)]


def _dense(writer: _Writer, groups: Sequence[ReadGroup]) -> list[int]:
    rows: list[int] = []
    tiles: list[int] = []
    for group in groups:
        for slot in group.bases:
            at, count = len(rows), _count(group.rows)
            rows += _flat(group.rows)
            for first in range(0, count, FEW.batch):
                tiles += (at + first, min(FEW.batch, count - first), slot)
    return [writer.add(rows), writer.add(tiles)] if tiles else []


def _launch(
    writer: _Writer, groups: Sequence[ReadGroup], tiles: Tiles
) -> tuple[Tiles, int, list[int]]:
    table: list[int] = []
    rows: list[int] = []
    pages: list[int] = []
    score_tiles: list[int] = []
    row_tiles: list[int] = []
    scores = 0
    for index, group in enumerate(groups):
        m, r = _count(group.rows), _count(group.runs)
        table += (len(rows), m, len(pages), r, scores)
        rows += _flat(group.rows)
        pages += _flat(group.runs)
        scores += m * r
        for first in range(0, m, tiles.batch):
            row_tiles += (index, first)
            for page in range(0, r, tiles.pages):
                score_tiles += (index, first, page)
    parts = [writer.add(t) for t in (table, rows, pages, score_tiles, row_tiles)]
    return tiles, scores, parts


def _flat(ranges: Sequence[tuple[int, int]]) -> list[int]:
    return [i for first, end in ranges for i in range(first, end)]


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(end - first for first, end in ranges)
