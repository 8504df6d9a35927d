"""Selective commit on the GPU: one launch, and the host need not know what is selected."""

from __future__ import annotations

from torch import Tensor

from sgl_rwttt.kernels.selective_commit.check import check_commit
from sgl_rwttt.kernels.triton_rows import move_rows


def selective_commit(
    src: Tensor, dst: Tensor, src_slots: Tensor, dst_slots: Tensor, selected: Tensor | None = None
) -> None:
    """As ``torch_impl.selective_commit``."""
    check_commit(src, dst, src_slots, dst_slots, selected)
    move_rows(
        src.flatten(1)[None],
        dst.flatten(1)[None],
        src_slots,
        dst_slots,
        src_slots.shape[0],
        selected,
    )
