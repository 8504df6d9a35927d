"""What breaks in numbers and storage: kinds 20 and 21."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.field.rig import C, Field, prompt

BOUNDARIES = 20
STATE_BOUND = 1e-5  # relative, float32
KL_BOUND = 1e-3  # mean of exp(r) - 1 - r per token, bfloat16 pages against float32 ones


def test_no_two_owners_or_layers_share_storage() -> None:
    """Kind 20. Guards: one memory per batch, or layers that alias one storage (titans-pytorch#6,
    titans-pytorch#64, LaCT#22)."""
    field = Field(pages=60)
    owners = [field.open(f"o{i}", prompt(2 * C + 1 + i % 3, i)) for i in range(4)]
    held = [p for o in owners for p in (*o.state.version.pages, o.state.tail.page)]
    assert len(set(held)) == len(held)
    for pool in (field.backend.H, field.backend.V, field.backend.D):
        for layer in range(2):
            pool[layer, 0] = 1.0 + layer
        assert pool[0, 0].eq(1.0).all() and pool[1, 0].eq(2.0).all()
    field.after()
    page = owners[0].state.version.pages[0]
    field.backend.V[:, page * C : page * C + C] += 1.0
    for owner in owners[1:]:
        owner.check()
    with pytest.raises(AssertionError):
        owners[0].check()


def test_owners_at_different_offsets_equal_solo_runs() -> None:
    """Kind 20. Guards: one offset for the whole batch (LaCT#22)."""
    field = Field(pages=60)
    owners = [field.open(f"o{i}", prompt(i, i)) for i in range(2 * C)]
    for step in range(2 * C + 1):
        field.feed(*((owner, prompt(1, 50 + 10 * i + step)) for i, owner in enumerate(owners)))
    for owner in owners:
        owner.check()
        solo = Field().open("a", owner.context)
        assert solo.state.clock.state_id == owner.state.clock.state_id


def trajectory(size: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Owner 0 in a batch of `size`: its layer-0 weights after each boundary, and its answers."""
    field = Field(pages=8 * BOUNDARIES + 8, dtype=dtype)
    states = [field.open(f"o{i}", prompt(i % C, 90 + i) if i else []) for i in range(size)]
    weights, answers = [], []
    for step in range(BOUNDARIES * C):
        deltas = field.feed(*((o, prompt(1, 1000 * i + step)) for i, o in enumerate(states)))
        answers.append(deltas[0])
        if (step + 1) % C == 0:
            weights.append(field.backend.dense(states[0].state.version, 0))
    return weights, torch.cat(answers, 1)


@pytest.mark.parametrize("size", [2, 7, 8])
def test_drift_between_batch_sizes_is_bounded(
    size: int, record_property: pytest.RecordProperty
) -> None:
    """Kind 21. Guards: output that depends on the batch size, fed back by the updates
    (sglang#2687, vllm#42960). Reports the largest difference after each of 20 boundaries."""
    alone, _ = trajectory(1)
    together, _ = trajectory(size)
    drift = [
        ((a - b).abs().max() / a.abs().max()).item() for a, b in zip(alone, together, strict=True)
    ]
    record_property("max_relative_drift", [f"{d:.1e}" for d in drift])
    assert len(drift) == BOUNDARIES
    assert max(drift) <= STATE_BOUND, drift


def test_bfloat16_pages_stay_near_float32(record_property: pytest.RecordProperty) -> None:
    """Kind 21. Guards: pages of half the memory that change the distribution (vllm#42960)."""
    _, exact = trajectory(1)
    _, coarse = trajectory(8, torch.bfloat16)
    head = torch.randn(50, 16, generator=torch.Generator().manual_seed(7))
    p, q = (torch.log_softmax(answers[-1] @ head.T, -1) for answers in (exact, coarse))
    sampled = p.argmax(-1, keepdim=True)
    r = (q.gather(-1, sampled) - p.gather(-1, sampled)).squeeze(-1)
    estimate = (r.exp() - 1 - r).mean().item()
    record_property("kl_estimate", f"{estimate:.1e}")
    assert 0 <= estimate < KL_BOUND
