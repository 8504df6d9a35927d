"""Fold with one matrix product per run of page rows."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def dense_update(
    D: Tensor, src: int | None, dst: int, runs: Sequence[tuple[int, int]], H: Tensor, V: Tensor
) -> None:
    """Fill D[dst] with D[src] (zeros for None) plus V_run^T H_run of every run, in order.

    D [bases, d, d_ff] float32; runs are [first, end) rows of H [rows, d_ff] and V [rows, d].
    Whatever D[dst] held before is overwritten. Products and sums are float32. Raises ValueError
    when src and dst are the same slot.
    """
    check_slots(src, dst)
    target = D[dst]
    if src is None:
        target.zero_()
    else:
        target.copy_(D[src])
    for first, end in runs:
        target.addmm_(V[first:end].T.to(D.dtype), H[first:end].to(D.dtype))


def check_slots(src: int | None, dst: int) -> None:
    """Raises ValueError for a base that would be changed under its readers."""
    if src == dst:
        raise ValueError(f"a base cannot be folded into itself (slot {dst})")
