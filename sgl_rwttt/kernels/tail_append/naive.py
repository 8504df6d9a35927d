"""TailBufferUpdate one row at a time: the reference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def tail_append(
    h: Tensor, t: Tensor, H: Tensor, V: Tensor, stretches: Sequence[tuple[int, int, int]]
) -> None:
    """As ``torch_impl.tail_append``, from stretches of (batch row, pool row, rows)."""
    for src, dst, count in stretches:
        for i in range(count):
            H[dst + i] = h[src + i]
            V[dst + i] = t[src + i]
