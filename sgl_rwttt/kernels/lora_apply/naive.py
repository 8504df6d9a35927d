"""LoRA READ one row at a time: the reference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def lora_apply(
    h: Tensor, out: Tensor, slots: Sequence[int], A: Tensor, B: Tensor, scale: float
) -> None:
    """As ``torch_impl.lora_apply``, from the slot of each row; any floating dtype."""
    for row, slot in enumerate(slots):
        if slot:
            inner = A[slot].to(out.dtype) @ h[row].to(out.dtype)
            out[row] += scale * (B[slot].to(out.dtype) @ inner)
