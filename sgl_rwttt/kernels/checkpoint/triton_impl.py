"""Checkpoints on the GPU: one launch per pool."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sgl_rwttt.kernels.checkpoint.layout import (
    Checkpoint,
    by_slot,
    check_fits,
    empty,
    slots_table,
)
from sgl_rwttt.kernels.triton_rows import move_rows


def checkpoint_write(
    H: Tensor, V: Tensor, D: Tensor, pages: Sequence[int], base: int | None, chunk: int
) -> Checkpoint:
    """As ``torch_impl.checkpoint_write``."""
    pools = by_slot(H, V, D, chunk)
    checkpoint = empty(pools, len(pages), base is not None)
    slots = slots_table(pages, base, H.device)
    move_rows(pools.H, checkpoint.H, slots, None, len(pages))
    move_rows(pools.V, checkpoint.V, slots, None, len(pages))
    if checkpoint.D is not None:
        move_rows(pools.D, checkpoint.D, slots[len(pages) :], None, 1)
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
    slots = slots_table(pages, base, H.device)
    move_rows(checkpoint.H, pools.H, None, slots, len(pages))
    move_rows(checkpoint.V, pools.V, None, slots, len(pages))
    if checkpoint.D is not None:
        move_rows(checkpoint.D, pools.D, None, slots[len(pages) :], 1)
