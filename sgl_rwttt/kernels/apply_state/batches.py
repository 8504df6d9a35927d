"""A read plan for the CPU: groups of one shape become batched products over strided views."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.kernels.apply_state.plan import ReadGroup, ReadPlan, levels, merge_ranges
from sgl_rwttt.kernels.host import device_table

Rows = slice | Tensor  # a slice where the rows are contiguous, else an int64 index


class Run(NamedTuple):
    """The page rows that each group of a batch reads next, equally many each."""

    firsts: tuple[int, ...]  # first pool row per group
    rows: int
    stride: int | None  # between firsts, where it is constant and not negative


class Batch(NamedTuple):
    """Groups with equally many batch rows and runs of equal lengths; no row is in two of them."""

    rows: Rows  # of all groups, group by group
    groups: int
    runs: tuple[Run, ...]


class Batches(NamedTuple):
    """A whole plan. A row has one base at most, and it comes before the row's pages."""

    bases: tuple[tuple[Rows, int], ...]
    pages: tuple[Batch, ...]


def make_batches(plan: ReadPlan) -> Batches:
    """Batch the groups of ``plan``; pass it to ``ReadPlan.prepared``."""
    bases = [(rows_of([g], plan.device), slot) for g in plan.groups for slot in g.bases]
    return Batches(tuple(bases), tuple(_page_batches(plan)))


def same_shape(groups: Sequence[ReadGroup]) -> list[list[ReadGroup]]:
    """Groups with pages by level, number of rows and lengths of runs, level by level."""
    shapes: dict[tuple[int, int, tuple[int, ...]], list[ReadGroup]] = {}
    for level, group in zip(levels(groups), groups, strict=True):
        if group.runs:
            count = sum(end - first for first, end in group.rows)
            lengths = tuple(end - first for first, end in group.runs)
            shapes.setdefault((level, count, lengths), []).append(group)
    return [shapes[key] for key in sorted(shapes)]


def rows_of(groups: Sequence[ReadGroup], device: torch.device) -> Rows:
    """The batch rows of ``groups``, in their order."""
    ranges = merge_ranges(r for group in groups for r in group.rows)
    if len(ranges) == 1:
        return slice(*ranges[0])
    return device_table([row for first, end in ranges for row in range(first, end)], device)


def _page_batches(plan: ReadPlan) -> Iterator[Batch]:
    for groups in same_shape(plan.groups):
        groups = sorted(groups, key=lambda group: group.runs)
        runs = tuple(_run(column) for column in zip(*(g.runs for g in groups), strict=True))
        yield Batch(rows_of(groups, plan.device), len(groups), runs)


def _run(ranges: Sequence[tuple[int, int]]) -> Run:
    firsts = tuple(first for first, _ in ranges)
    rows = ranges[0][1] - ranges[0][0]
    steps = {after - before for before, after in pairwise(firsts)}
    stride = steps.pop() if len(steps) == 1 else None
    return Run(firsts, rows, stride if stride is not None and stride >= 0 else None)
