"""Which rows of a decode step read which KV slots together, decided once for all layers.

Rows that begin with the same slots (siblings of one prefix) read those once, together. What is
left of each row is gathered, several rows of similar length per call, as many as stay in the cache
between the gather and the products. Gathering a row costs less than a call of its own that reads it
in place, and the copy is read from the cache: only shared slots, and those of a row that has a call
to itself anyway, are read where they are if they are consecutive.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.kernels.attention import as_run

SCRATCH_BYTES = 4 << 20  # gathered K and V of one call; above it they leave the cache
PADDING_BYTES = 384 << 10  # padding that costs as much as one more call
SHARED_BYTES = 512 << 10  # reads that must be saved to be worth a separate call and a merge


class SharedRead(NamedTuple):
    """Several rows that read the same slots."""

    rows: Tensor  # int64 [m]
    slots: slice | Tensor  # a slice where the slots are consecutive, else int64 [T]


class OwnRead(NamedTuple):
    """Several rows that each read ``width`` slots of their own."""

    rows: slice | Tensor  # a slice for all rows in order, else int64 [n]
    slots: slice | Tensor  # a slice for one row with consecutive slots, else int64 [n * width]:
    # past a row's end its own last slot is repeated
    width: int
    mask: Tensor | None  # float32 [n, 1, 1, width], -inf past a row's end; None without padding


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The reads of one decode step. A row without slots is in none of them."""

    rows: int
    own: tuple[OwnRead, ...]
    shared: tuple[SharedRead, ...]


def plan_decode(slots: Tensor, lengths: Sequence[int], row_bytes: int) -> DecodePlan:
    """Plan a step in which row r reads ``slots[r, :lengths[r]]``.

    ``slots`` is int64 [rows, at least the longest length]; what lies past a row's length is not
    used. ``row_bytes`` is the size of one slot's K and V. The last slot of a row is never shared,
    so every row with slots has an ``OwnRead``.
    """
    starts = [0] * len(lengths)
    shared = []
    for members, count in shared_prefixes(slots, lengths, row_bytes):
        shared.append(SharedRead(torch.tensor(members), as_run(slots[members[0], :count])))
        for row in members:
            starts[row] = count
    own = [length - start for length, start in zip(lengths, starts, strict=True)]
    groups = tuple(_own_read(slots, rows, starts, own) for rows in _batches(own, max(1, row_bytes)))
    return DecodePlan(len(lengths), groups, tuple(shared))


def shared_prefixes(
    slots: Tensor, lengths: Sequence[int], row_bytes: int
) -> Iterator[tuple[list[int], int]]:
    """Rows that begin with the same slots, and how many of them all of these rows share."""
    siblings: dict[int, list[int]] = {}
    for row, first in enumerate(slots[:, 0].tolist() if slots.shape[1] else ()):
        if lengths[row] > 1:
            siblings.setdefault(first, []).append(row)
    for members in siblings.values():
        most = min(lengths[row] for row in members) - 1
        if most * (len(members) - 1) * row_bytes < SHARED_BYTES:
            continue
        table = slots[members, :most]
        same = (table == table[0]).all(0)
        count = most if bool(same.all()) else int(same.int().argmin())
        if count * (len(members) - 1) * row_bytes >= SHARED_BYTES:
            yield members, count


def _batches(own: Sequence[int], row_bytes: int) -> Iterator[list[int]]:
    """Rows to read together, the longest first; ascending within a batch."""
    order = sorted((row for row, length in enumerate(own) if length), key=lambda row: -own[row])
    batch: list[int] = []
    padding = 0
    for row in order:
        width = own[batch[0]] if batch else own[row]
        wasted = padding + width - own[row]
        fits = (len(batch) + 1) * width * row_bytes <= SCRATCH_BYTES
        if batch and not (fits and wasted * row_bytes <= PADDING_BYTES):
            yield sorted(batch)
            batch, wasted = [], 0
        batch.append(row)
        padding = wasted
    if batch:
        yield sorted(batch)


def _own_read(slots: Tensor, rows: list[int], starts: Sequence[int], own: Sequence[int]) -> OwnRead:
    index = torch.tensor(rows)
    lengths = torch.tensor([own[row] for row in rows]).unsqueeze(1)
    width = int(lengths.max())
    columns = torch.arange(width)
    first = torch.tensor([starts[row] for row in rows]).unsqueeze(1)
    read = slots[index].gather(1, first + columns.minimum(lengths - 1))
    mask = None
    if int(lengths.min()) < width:
        mask = torch.zeros(len(rows), 1, 1, width)
        mask[:, 0, 0].masked_fill_(columns >= lengths, -torch.inf)
    whole = len(rows) == slots.shape[0]
    where = as_run(read[0]) if len(rows) == 1 else read.flatten()
    return OwnRead(slice(None) if whole else index, where, width, mask)
