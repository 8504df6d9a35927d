"""TailBufferUpdate with one indexed copy per pool, or a few slice copies."""

from __future__ import annotations

from torch import Tensor

from sgl_rwttt.kernels.tail_append.plan import AppendPlan


def tail_append(h: Tensor, t: Tensor, H: Tensor, V: Tensor, plan: AppendPlan) -> None:
    """Write rows of h [N, d_ff] into H and of t [N, d] into V; all other pool rows stay.

    h has the dtype of the pools; t is cast on the way.
    """
    if plan.dst_rows is None:
        for src, dst, count in plan.copies:
            H[dst : dst + count] = h[src : src + count]
            V[dst : dst + count] = t[src : src + count]
        return
    if plan.src_rows is not None:
        h = h.index_select(0, plan.src_rows)
        t = t.index_select(0, plan.src_rows)
    else:
        h = h[: plan.dst_rows.shape[0]]
        t = t[: plan.dst_rows.shape[0]]
    H.index_copy_(0, plan.dst_rows, h)
    V.index_copy_(0, plan.dst_rows, t.to(V.dtype))
