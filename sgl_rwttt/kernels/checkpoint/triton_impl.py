"""Checkpoints on the GPU: one launch per pool."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sgl_rwttt.kernels.checkpoint.layout import (
    Checkpoint,
    by_slot,
    check_fits,
    empty,
    pairs,
    slots_table,
)
from sgl_rwttt.kernels.triton_rows import move_rows


def checkpoint_write(
    H: Tensor, V: Tensor, D: Tensor, pages: Sequence[int], base: int | None, chunk: int
) -> Checkpoint:
    """As ``torch_impl.checkpoint_write``."""
    pools = by_slot(H, V, D, chunk)
    checkpoint = empty(pools, len(pages), base is not None)
    for pool, copy, slots in pairs(pools, checkpoint, slots_table(pages, base, H.device)):
        move_rows(pool, copy, slots, None, slots.shape[0])
    return checkpoint


def checkpoint_read(
    checkpoint: Checkpoint,
    H: Tensor,
    V: Tensor,
    D: Tensor,
    pages: Sequence[int],
    base: int | None,
    chunk: int,
) -> None:
    """As ``torch_impl.checkpoint_read``."""
    pools = by_slot(H, V, D, chunk)
    check_fits(checkpoint, pages, base)
    for pool, copy, slots in pairs(pools, checkpoint, slots_table(pages, base, H.device)):
        move_rows(copy, pool, None, slots, slots.shape[0])
