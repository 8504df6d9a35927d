"""Where the rows of a batch go in the page pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ROWS_PER_COPY = 16  # below this mean length, one indexed copy beats a loop of slice copies


@dataclass(frozen=True, slots=True)
class AppendPlan:
    """Either ``copies`` (long contiguous stretches) or the two index tensors, int64."""

    copies: tuple[tuple[int, int, int], ...]  # (batch row, pool row, rows)
    src_rows: Tensor | None  # batch rows; None: the first rows of the batch, in order
    dst_rows: Tensor | None  # pool rows; None: use ``copies``


def plan_append(stretches: Sequence[tuple[int, int, int]], device: torch.device) -> AppendPlan:
    """Plan ``stretches`` of (batch row, pool row, rows)."""
    merged: list[tuple[int, int, int]] = []
    for src, dst, count in stretches:
        if merged:
            a, b, n = merged[-1]
            if (a + n, b + n) == (src, dst):
                merged[-1] = (a, b, n + count)
                continue
        merged.append((src, dst, count))
    total = sum(count for _, _, count in merged)
    if not merged or total >= _ROWS_PER_COPY * len(merged):
        return AppendPlan(tuple(merged), None, None)
    src_rows = [src + i for src, _, count in merged for i in range(count)]
    dst_rows = [dst + i for _, dst, count in merged for i in range(count)]
    prefix = src_rows == list(range(total))
    return AppendPlan(
        (),
        None if prefix else torch.tensor(src_rows, dtype=torch.int64, device=device),
        torch.tensor(dst_rows, dtype=torch.int64, device=device),
    )
