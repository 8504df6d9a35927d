"""Decode attention on the CPU: one query token per row against the row's slots of the KV pool.

Which slots a step reads is planned once (`plan`), and every layer runs the plan (`run`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sgl_rwttt.kernels.attention import Scratch
from sgl_rwttt.kernels.dispatch import compiled


class DecodeAttention(Protocol):
    """One way to compute it."""

    @property
    def plan_type(self) -> type:
        """The class of its plans."""

    def plan(self, slots: Tensor, lengths: Sequence[int], row_bytes: int) -> Any:
        """Plan a step in which row r reads ``slots[r, :lengths[r]]``.

        ``slots`` is int64 [rows, at least the longest length]; what lies past a row's length is
        not used. ``row_bytes`` is the size of one slot's K and V. Slots with which several rows
        begin are read once for all of them where that saves enough.
        """

    def run(self, q: Tensor, K: Tensor, V: Tensor, plan: Any, scale: float) -> Tensor:
        """Return [rows, Hq, D]: each row of q [rows, Hq, D] attends to the slots of its plan.

        K and V are pools [slots, Hk, D] in q's dtype, contiguous; Hk divides Hq, and query heads
        ``h * Hq / Hk`` and following use KV head h. Only slots named in the plan are read, so free
        slots may hold anything. A row without slots gives zeros.
        """


def decode_attention(dtype: torch.dtype, scratch: Scratch) -> DecodeAttention:
    """Compiled for float32 where that runs, else with torch. Gathers go into ``scratch``."""
    module = compiled("decode_attention") if dtype == torch.float32 else None
    if module is not None:
        made: DecodeAttention = module.JitDecodeAttention(scratch)
        return made
    from sgl_rwttt.kernels.decode_attention.torch_impl import TorchDecodeAttention

    return TorchDecodeAttention(scratch)
