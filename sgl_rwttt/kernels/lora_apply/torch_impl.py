"""LoRA READ with two batched products per number of rows that share an adapter."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.kernels.apply_state.batches import Rows, rows_of, same_shape
from sgl_rwttt.kernels.apply_state.plan import ReadPlan
from sgl_rwttt.kernels.apply_state.torch_impl import put_back, select
from sgl_rwttt.kernels.host import device_table


class _Batch(NamedTuple):
    rows: Rows
    slots: Tensor  # [G] int64


def lora_apply(h: Tensor, out: Tensor, plan: ReadPlan, A: Tensor, B: Tensor, scale: float) -> None:
    """out += scale * (h A^T) B^T in place, with each row's own adapter.

    h [N, d_in], A [slots, r, d_in] and B [slots, d_out, r] share one dtype, A and B with adjacent
    rows or columns as shown; out [N, d_out] is float32. ``plan`` is made by ``plan_lora`` for the
    rank r. Rows that read the dummy slot 0 are not touched, and slots that no row reads may hold
    anything. Products and sums are float32. Raises ValueError for another rank than the plan's.
    """
    check_rank(plan, A, B)
    for rows, slots in plan.prepared(_batches):
        total = select(out, rows).view(slots.shape[0], -1, out.shape[1])
        x = select(h, rows).to(out.dtype).view(slots.shape[0], -1, h.shape[1])
        inner = torch.bmm(x, A.index_select(0, slots).to(out.dtype).transpose(1, 2))
        total.baddbmm_(inner, B.index_select(0, slots).to(out.dtype).transpose(1, 2), alpha=scale)
        put_back(out, rows, total.flatten(0, 1))


def check_rank(plan: ReadPlan, A: Tensor, B: Tensor) -> None:
    """Raises ValueError when the pools' rank is not the plan's."""
    if not plan.chunk == A.shape[1] == B.shape[2]:
        raise ValueError(
            f"the plan is for rank {plan.chunk}; A has rank {A.shape[1]}, B {B.shape[2]}"
        )


def _batches(plan: ReadPlan) -> list[_Batch]:
    """Each group has one run, of whole adapters; rows read one adapter, so its slot is one."""
    batches = []
    for groups in same_shape(plan.groups):
        slots = [group.runs[0][0] // plan.chunk for group in groups]
        batches.append(_Batch(rows_of(groups, plan.device), device_table(slots, plan.device)))
    return batches
