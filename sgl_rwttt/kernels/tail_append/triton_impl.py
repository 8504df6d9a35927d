"""TailBufferUpdate on the GPU: one launch per pool."""

from __future__ import annotations

from torch import Tensor

from sgl_rwttt.kernels.tail_append.plan import AppendPlan
from sgl_rwttt.kernels.triton_rows import move_rows


def tail_append(h: Tensor, t: Tensor, H: Tensor, V: Tensor, plan: AppendPlan) -> None:
    """As ``torch_impl.tail_append``."""
    for rows, pool in ((h, H), (t, V)):
        move_rows(rows[None], pool[None], plan.src_rows, plan.dst_rows, plan.rows)
