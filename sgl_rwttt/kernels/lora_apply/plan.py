"""Which rows of a batch read which adapter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_rwttt.kernels.apply_state.plan import ReadPart, ReadPlan, plan_read


def plan_lora(slots: Sequence[int], rank: int, device: torch.device) -> ReadPlan:
    """Plan rows 0, 1, ... that read adapter ``slots[row]``; 0 is the dummy and reads nothing.

    Adapters of one call share one rank. An adapter is a page of ``rank`` rows, so rows that read
    the same adapter form one group.
    """
    stretches = _stretches(slots)
    parts = [[ReadPart(first, count, None, (slot,))] for first, count, slot in stretches if slot]
    return plan_read(parts, rank, device)


def _stretches(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Stretches (first row, rows, slot) of equal neighbours."""
    merged: list[tuple[int, int, int]] = []
    for row, slot in enumerate(slots):
        if merged and merged[-1][2] == slot:
            first, count, _ = merged[-1]
            merged[-1] = (first, count + 1, slot)
        else:
            merged.append((row, 1, slot))
    return merged
