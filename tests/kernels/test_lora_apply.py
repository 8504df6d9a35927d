"""LoRA READ on the torch path, one row at a time."""

from __future__ import annotations

import pytest
import torch

from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.lora_apply import naive
from sgl_rwttt.kernels.lora_apply.plan import plan_lora
from tests.assert_close import assert_close

CPU = torch.device("cpu")
SLOTS = {
    "none": [0, 0],
    "own": [3, 1, 2, 5],
    "permuted, shared, dummies": [2, 5, 0, 4, 2, 0, 1, 1],
    "one": [4] * 5,
}


@pytest.mark.parametrize("slots", SLOTS.values(), ids=SLOTS)
@pytest.mark.parametrize("rank", [1, 8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lora(slots: list[int], rank: int, dtype: torch.dtype) -> None:
    """Guards: a row under another row's adapter, dummy rows that change, free slots that count."""
    torch.manual_seed(0)
    A, B = torch.full((6, rank, 63), torch.nan), torch.full((6, 40, rank), torch.nan)
    for slot in set(slots) - {0}:
        A[slot], B[slot] = torch.randn(rank, 63), torch.randn(40, rank)
    A, B, h = A.to(dtype), B.to(dtype), torch.randn(len(slots), 63).to(dtype)
    h[[row for row, slot in enumerate(slots) if not slot]] = torch.nan
    out = torch.randn(len(slots), 40)
    expected = out.double()
    naive.lora_apply(h.double(), expected, slots, A.double(), B.double(), 0.5)
    kernel("lora_apply")(h, out, plan_lora(slots, rank, CPU), A, B, 0.5)
    assert_close(out, expected, 1e-6)


def test_rank_of_the_plan() -> None:
    """Guards: a plan of another rank, which would read half of one adapter and half of the next."""
    A, B, h = torch.zeros(3, 4, 8), torch.zeros(3, 8, 4), torch.zeros(1, 8)
    with pytest.raises(ValueError, match="the plan is for rank 2; A has rank 4"):
        kernel("lora_apply")(h, torch.zeros(1, 8), plan_lora([1], 2, CPU), A, B, 1.0)
