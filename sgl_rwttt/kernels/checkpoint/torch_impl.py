"""Checkpoints with one indexed copy per pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_rwttt.kernels.checkpoint.layout import (
    Checkpoint,
    by_slot,
    check_fits,
    empty,
    pairs,
    slots_table,
)


def checkpoint_write(
    H: Tensor, V: Tensor, D: Tensor, pages: Sequence[int], base: int | None, chunk: int
) -> Checkpoint:
    """Return a copy of the pages (in the order given) and the base of one owner, all layers.

    H [L, P * C, d_ff] and V [L, P * C, d] share a dtype, D [L, B, d, d_ff] is float32; all are
    contiguous. Whole pages are copied, an open page's unused rows with what they hold. The copy is
    bitwise, one buffer of bytes, and the caller's. Raises ValueError when C does not divide the
    rows.
    """
    pools = by_slot(H, V, D, chunk)
    checkpoint = empty(pools, len(pages), base is not None)
    for pool, copy, slots in pairs(pools, checkpoint, slots_table(pages, base, H.device)):
        torch.index_select(pool, 1, slots, out=copy)
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
    """Fill ``pages`` and ``base`` of the pools with a checkpoint; nothing else changes.

    The pools are those of ``checkpoint_write`` in shape and dtype; the slots may be others. Raises
    ValueError when the checkpoint has another number of pages, or a base too many or too few.
    """
    pools = by_slot(H, V, D, chunk)
    check_fits(checkpoint, pages, base)
    for pool, copy, slots in pairs(pools, checkpoint, slots_table(pages, base, H.device)):
        pool.index_copy_(1, slots, copy)
