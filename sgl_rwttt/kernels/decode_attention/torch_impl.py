"""Decode attention from a plan, with torch's CPU flash attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_rwttt.kernels.attention import Scratch, attend, merge
from sgl_rwttt.kernels.decode_attention.plan import (
    DecodePlan,
    OwnRead,
    SharedRead,
    plan_decode,
)


class TorchDecodeAttention:
    """See ``DecodeAttention``; any floating dtype. Gathers into ``scratch``."""

    plan_type = DecodePlan

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch

    def plan(self, slots: Tensor, lengths: Sequence[int], row_bytes: int) -> DecodePlan:
        """See ``DecodeAttention.plan``."""
        return plan_decode(slots, lengths, row_bytes)

    def run(self, q: Tensor, K: Tensor, V: Tensor, plan: DecodePlan, scale: float) -> Tensor:
        """See ``DecodeAttention.run``."""
        grouped = q.view(q.shape[0], K.shape[1], -1, q.shape[2])
        out = torch.zeros_like(grouped)
        lse = torch.empty(grouped.shape[:3]) if plan.shared else None
        for own in plan.own:
            part, part_lse = _own(grouped[own.rows], K, V, own, scale, self._scratch)
            out[own.rows] = part
            if lse is not None:
                lse[own.rows] = part_lse
        if lse is not None:
            add_shared(plan.shared, grouped, out, lse, K, V, scale, self._scratch)
        return out.view(q.shape)


def _own(
    q: Tensor, K: Tensor, V: Tensor, read: OwnRead, scale: float, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """The heads of a group are the rows of one product, so K and V are not repeated."""
    k = scratch.read(0, K, read.slots).view(-1, read.width, *K.shape[1:])
    v = scratch.read(1, V, read.slots).view(-1, read.width, *V.shape[1:])
    return attend(q, k.transpose(1, 2), v.transpose(1, 2), scale, mask=read.mask)


def add_shared(
    reads: Sequence[SharedRead],
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    K: Tensor,
    V: Tensor,
    scale: float,
    scratch: Scratch,
) -> None:
    """Merge what several rows read together into ``out``, in place.

    q and out are [rows, Hk, Hq / Hk, D]; ``lse`` [rows, Hk, Hq / Hk] is that of what is in out.
    """
    for read in reads:
        rows = read.rows
        part, part_lse = _shared(q[rows], K, V, read, scale, scratch)
        out[rows] = merge(out[rows], lse[rows], part, part_lse)


def _shared(
    q: Tensor, K: Tensor, V: Tensor, read: SharedRead, scale: float, scratch: Scratch
) -> tuple[Tensor, Tensor]:
    """All rows' heads of a group are the rows of one product."""
    rows, heads, group, size = q.shape
    k, v = scratch.read(0, K, read.slots), scratch.read(1, V, read.slots)
    stacked = q.transpose(0, 1).reshape(1, heads, rows * group, size)
    out, lse = attend(stacked, k.transpose(0, 1)[None], v.transpose(0, 1)[None], scale)
    return (
        out.reshape(heads, rows, group, size).transpose(0, 1),
        lse.reshape(heads, rows, group).transpose(0, 1),
    )
