"""Selective commit with one indexed copy."""

from __future__ import annotations

from torch import Tensor

from sgl_rwttt.kernels.selective_commit.check import check_commit


def selective_commit(
    src: Tensor, dst: Tensor, src_slots: Tensor, dst_slots: Tensor, selected: Tensor | None = None
) -> None:
    """dst[dst_slots[i]] = src[src_slots[i]] for every i with selected[i]; all other slots stay.

    src [A, ...] and dst [B, ...] have equal shapes behind the slot, contiguous there; values are
    cast to dst's dtype. src_slots and dst_slots [n] int64 and selected [n] bool (None: all) are
    on the same device. No slot may be written twice; src and dst may be one pool if no slot is
    read and written. What unselected entries name is neither read nor written, so they (and
    padding) may hold any slot. Raises ValueError for shapes or dtypes that do not fit.
    """
    check_commit(src, dst, src_slots, dst_slots, selected)
    if selected is not None:
        src_slots, dst_slots = src_slots[selected], dst_slots[selected]
    dst.index_copy_(0, dst_slots, src.index_select(0, src_slots).to(dst.dtype))
