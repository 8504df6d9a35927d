"""What breaks when owners share a forward pass: kinds 12, 13 and 22."""

from __future__ import annotations

import random

import pytest
import torch

from sgl_rwttt.core.segment import BlockPart, Segment
from tests.field.rig import C, Field, Row, mixed, prompt

STEPS = 2 * C + 1


def run(rows: list[list[int]], left: list[int], right: list[int], fold: int) -> Field:
    """Three owners decode; each step has its row order and padding."""
    field = Field(pages=60, bases=20, fold_pages=fold)
    owners = [field.open(f"o{i}", mixed(C + i, i)) for i in range(3)]
    new = [mixed(STEPS, 10 + i) for i in range(3)]
    for step in range(STEPS):
        batch = [(owner, [new[i][step]]) for i, owner in enumerate(owners)]
        field.feed(*batch, rows=rows[step], left=left[step], right=right[step])
    for owner in owners:
        owner.check()
    return field


@pytest.mark.parametrize("fold", [0, 1])
def test_padded_and_permuted_rows_change_no_bit(fold: int) -> None:
    """Kind 12. Guards: padded rows of a captured graph that hit live slots (tokenspeed PR#700,
    TensorRT-LLM PR#13151, vllm PR#42947): 3 rows padded to 8, permuted, 8 -> 3 -> 8."""
    rng = random.Random(3)
    same, none = [[0, 1, 2]] * STEPS, [0] * STEPS
    shuffled = [rng.sample(range(3), 3) for _ in range(STEPS)]
    padding = [5 if step % 3 != 1 else 0 for step in range(STEPS)]
    plain = run(same, none, none, fold)
    for field in (
        run(same, none, padding, fold),
        run(shuffled, none, none, fold),
        run(shuffled, padding, none, fold),
    ):
        for a, b in zip(plain.owners, field.owners, strict=True):
            assert a.fields == b.fields
            held, other = plain.content(a.state.version), field.content(b.state.version)
            assert held.keys() == other.keys()
            assert all(torch.equal(held[k], other[k]) for k in held)


def test_the_dummy_is_never_written_or_read() -> None:
    """Kind 12. Guards: the dummy slot taken for a page (vllm PR#42947): every operation leaves
    both dummies what they were, NaN."""
    field = Field(fold_pages=1)
    field.padding = 7.0
    owner = field.open("a", mixed(3 * C + 1))
    batch = [(owner, prompt(C + 1))]
    plan, _ = field.forward_rows(field.plan(*batch, left=2), batch, left=2, right=5)
    assert field.backend.finish_step(plan) == [True]
    for pool in (field.backend.H[:, :C], field.backend.V[:, :C], field.backend.D[:, 0]):
        assert pool.isnan().all()


@pytest.mark.parametrize("company", ["alone", "left", "right", "joined", "joined late"])
@pytest.mark.parametrize("length", [1, C - 1, C, 2 * C + 1])
def test_padding_and_company_are_no_evidence(length: int, company: str) -> None:
    """Kind 13. Guards: padding, or joining a running batch, that updates the state (mlx-lm PR#1169,
    transformers#48256, transformers#31540)."""
    context: list[Row] = mixed(length, 4)
    alone = Field().open("a", context)
    field = Field(pages=60)
    others = [field.open(f"o{i}", mixed(C + i, i)) for i in range(3)]
    owner = field.open("a")
    padding = {"left": (3, 0), "right": (0, 3)}.get(company, (0, 0))
    batch = [(owner, context)]
    if company.startswith("joined"):
        batch = [(other, mixed(1, 20)) for other in others] + batch
    if company == "joined late":
        batch.reverse()
    field.feed(*batch, left=padding[0], right=padding[1])
    owner.check()
    assert owner.state.clock.state_id == alone.state.clock.state_id
    held = field.content(owner.state.version)
    other = alone.field.content(alone.state.version)
    assert all(torch.equal(held[k], other[k]) for k in held)
    assert owner.tail_rows == alone.tail_rows


def test_allocators_return_plain_ints() -> None:
    """Kind 22. Guards: an index returned as a view that changes under its holder
    (Megatron-LM PR#6584)."""
    field = Field(pages=60, bases=20, fold_pages=2)
    owner = field.open("a", mixed(2 * C + 1))
    twin = owner.fork("b")
    batch = [(owner, mixed(3 * C, 5)), (twin, mixed(1, 6))]
    candidates = field.plan(*batch)
    slots: list[object] = [slot for c in candidates for slot in (*c.pages, *c.bases)]
    parts: list[BlockPart | Segment] = [c.segment for c in candidates]
    parts += [part for c in candidates for part in c.segment.parts]
    for part in parts:
        slots += [*part.pages, part.base]
        slots += [part.page, part.fold_base] if isinstance(part, BlockPart) else []
    view = field.store.view(owner.state)
    slots += [*view.pages, view.base, view.tail_page]
    assert {type(slot) for slot in slots} <= {int, type(None)} and len(slots) > 20
    kept = [tuple(part) for part in parts], tuple(view.pages)
    field.finish(candidates, *batch)
    assert kept == ([tuple(part) for part in parts], tuple(view.pages))
