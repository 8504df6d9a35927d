"""Checkpoints page by page: the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def checkpoint_write(
    H: Tensor, V: Tensor, D: Tensor, pages: Sequence[int], base: int | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The contents of a checkpoint, as three tensors of their own: H, V, D."""
    rows = [slice(page * chunk, (page + 1) * chunk) for page in pages]
    return (
        torch.cat([H[:, :0], *(H[:, r] for r in rows)], 1),
        torch.cat([V[:, :0], *(V[:, r] for r in rows)], 1),
        None if base is None else D[:, base].clone(),
    )
