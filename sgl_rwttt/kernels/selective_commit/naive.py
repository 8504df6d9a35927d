"""Selective commit one slot at a time: the reference."""

from __future__ import annotations

from torch import Tensor


def selective_commit(
    src: Tensor, dst: Tensor, src_slots: Tensor, dst_slots: Tensor, selected: Tensor | None = None
) -> None:
    """As ``torch_impl.selective_commit``."""
    for i, (a, b) in enumerate(zip(src_slots.tolist(), dst_slots.tolist(), strict=True)):
        if selected is None or selected[i]:
            dst[b] = src[a]
