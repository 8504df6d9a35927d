"""Fold one page row at a time: the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def dense_update(
    D: Tensor, src: int | None, dst: int, runs: Sequence[tuple[int, int]], H: Tensor, V: Tensor
) -> None:
    """As ``torch_impl.dense_update``."""
    D[dst] = 0 if src is None else D[src]
    for first, end in runs:
        for i in range(first, end):
            D[dst] += torch.outer(V[i].to(D.dtype), H[i].to(D.dtype))
