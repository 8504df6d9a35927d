"""Which thread reads which KV slots for which rows in a decode step, decided once for all layers.

What many rows read together is a matrix product. All other reads of a step are laid end to end and
cut into as many equal parts as there are threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sgl_rwttt.kernels.attention import as_run
from sgl_rwttt.kernels.decode_attention.plan import SharedRead, shared_prefixes

MANY = 8  # rows for which a product is faster than reading the cache once for each of them


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Tasks, each some rows that read the same slots, and the partial results that they give.

    A task gives one partial result for each of its rows. All tables are int64.
    """

    slots: Tensor  # [rows, width], contiguous
    tasks: Tensor  # [tasks, 4]: first of slots.view(-1), slots, first partial result, rows
    bounds: Tensor  # [parts + 1]: part p has the tasks from bounds[p] to bounds[p + 1]
    owners: Tensor  # [partials]: the row of each partial result
    order: Tensor  # [partials]: partial results, by row
    firsts: Tensor  # [rows + 1]: row r has those from order[firsts[r]] to order[firsts[r + 1]]
    shared: tuple[SharedRead, ...]  # in no task; every row of one has a task as well

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return self.slots.shape[0]

    @property
    def parts(self) -> int:
        """Equal parts of the step."""
        return self.bounds.shape[0] - 1


def plan_tasks(slots: Tensor, lengths: Sequence[int], row_bytes: int, parts: int) -> TaskPlan:
    """Plan a step as ``DecodeAttention.plan`` says, in ``parts`` parts."""
    slots = slots.contiguous()
    reads, shared = _reads(slots, lengths, row_bytes)
    total = sum(count * len(rows) for _, count, rows in reads)
    tasks: list[tuple[int, int, int, int]] = []
    owners: list[int] = []
    bounds = [0]
    done = 0
    for first, count, rows in reads:
        end = first + count
        while first < end:
            border = total * len(bounds) // parts  # where this part ends
            take = min(end - first, max(1, -(-(border - done) // len(rows))))
            tasks.append((first, take, len(owners), len(rows)))
            owners.extend(rows)
            first += take
            done += take * len(rows)
            if done >= border and len(bounds) < parts:
                bounds.append(len(tasks))
    bounds.extend([len(tasks)] * (parts + 1 - len(bounds)))
    counts = [0] * (len(lengths) + 1)
    for row in owners:
        counts[row + 1] += 1
    return TaskPlan(
        slots,
        torch.tensor(tasks, dtype=torch.int64).view(-1, 4),
        torch.tensor(bounds),
        torch.tensor(owners, dtype=torch.int64),
        torch.tensor(sorted(range(len(owners)), key=owners.__getitem__), dtype=torch.int64),
        torch.tensor(list(accumulate(counts))),
        tuple(shared),
    )


def _reads(
    slots: Tensor, lengths: Sequence[int], row_bytes: int
) -> tuple[list[tuple[int, int, list[int]]], list[SharedRead]]:
    """(first of slots.view(-1), how many, the rows that read them), and what many rows read."""
    width = slots.shape[1]
    starts = [0] * len(lengths)
    reads: list[tuple[int, int, list[int]]] = []
    products: list[SharedRead] = []
    for members, count in shared_prefixes(slots, lengths, row_bytes):
        if len(members) >= MANY:
            run = as_run(slots[members[0], :count])
            products.append(SharedRead(torch.tensor(members), run))
        else:
            reads.append((members[0] * width, count, members))
        for row in members:
            starts[row] = count
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length > start:
            reads.append((row * width + start, length - start, [row]))
    return reads, products
