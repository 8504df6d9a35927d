"""TailBufferUpdate with one indexed copy per pool, or a few slice copies."""

from __future__ import annotations

from torch import Tensor

from sgl_rwttt.kernels.tail_append.plan import AppendPlan


def tail_append(h: Tensor, t: Tensor, H: Tensor, V: Tensor, plan: AppendPlan) -> None:
    """Write rows of h [N, d_ff] into H [R, d_ff] and of t [N, d] into V [R, d], as planned.

    Rows are contiguous in memory. h has the dtype of the pools; t is cast on the way. Batch rows
    that the plan does not name (padding) are not read, and all other pool rows stay.
    """
    if plan.contiguous:
        for src, dst, count in plan.copies:
            H[dst : dst + count] = h[src : src + count]
            V[dst : dst + count] = t[src : src + count]
        return
    if plan.src_rows is not None:
        h = h.index_select(0, plan.src_rows)
        t = t.index_select(0, plan.src_rows)
    H.index_copy_(0, plan.dst_rows, h[: plan.rows])
    V.index_copy_(0, plan.dst_rows, t[: plan.rows].to(V.dtype))
