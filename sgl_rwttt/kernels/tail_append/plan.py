"""Where the rows of a batch go in the page pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sgl_rwttt.kernels.host import device_table

_ROWS_PER_COPY = 16  # below this mean length, one indexed copy beats a loop of slice copies


@dataclass(frozen=True, eq=False)
class AppendPlan:
    """Rows of one forward; the tables are made on first use and serve every layer."""

    copies: tuple[tuple[int, int, int], ...]  # (batch row, pool row, rows), neighbours joined
    device: torch.device

    @property
    def rows(self) -> int:
        """Rows that are appended."""
        return sum(count for _, _, count in self.copies)

    @property
    def contiguous(self) -> bool:
        """Whether there are few, long stretches."""
        return self.rows >= _ROWS_PER_COPY * len(self.copies)

    @cached_property
    def src_rows(self) -> Tensor | None:
        """Batch rows, int64; None: the first rows of the batch, in order."""
        rows = [src + i for src, _, count in self.copies for i in range(count)]
        return None if rows == list(range(len(rows))) else device_table(rows, self.device)

    @cached_property
    def dst_rows(self) -> Tensor:
        """Pool rows, int64."""
        rows = [dst + i for _, dst, count in self.copies for i in range(count)]
        return device_table(rows, self.device)


def plan_append(stretches: Sequence[tuple[int, int, int]], device: torch.device) -> AppendPlan:
    """Plan ``stretches`` of (batch row, pool row, rows); no pool row may occur twice."""
    merged: list[tuple[int, int, int]] = []
    for src, dst, count in stretches:
        if merged:
            a, b, n = merged[-1]
            if (a + n, b + n) == (src, dst):
                merged[-1] = (a, b, n + count)
                continue
        merged.append((src, dst, count))
    return AppendPlan(tuple(merged), device)
