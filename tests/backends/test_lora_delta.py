"""The LoRA backend's steps: READ per row, chained and deferred boundaries, failures."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_rwttt.backends.lora_delta import LoraDeltaBackend
from sgl_rwttt.core import faults
from tests.assert_close import assert_close
from tests.backends.lora_oracle import VOCAB, Owner, tiny_model
from tests.backends.lora_rig import Reads, make_backend, reading, segment

CHUNK = 6


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny_model("llama")


def ids(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def learn(backend: LoraDeltaBackend, reads: tuple[int, ...], slot: int, tokens: list[int]) -> None:
    """One owner's boundary by itself."""
    one = segment(0, CHUNK, reads, [(CHUNK, slot, tokens)])
    assert backend.finish_step(backend.begin_step([one])) == [True]


@torch.no_grad()
def logits(model: Any, backend: LoraDeltaBackend, tokens: list[int], *parts: Any) -> Tensor:
    """[T, vocab] of one sequence whose rows read as ``parts`` say."""
    with reading(model, backend, backend.begin_step(parts)):
        found: Tensor = model(input_ids=torch.tensor([tokens])).logits[0]
    return found


def test_read_equals_peft(model: Any) -> None:
    """Guards READ: hooks on the projections give what PEFT gives with the same adapter."""
    backend = make_backend(model, chunk=CHUNK, lr=0.02)
    tokens = ids(9, 1)
    plain = logits(model, backend, tokens, segment(0, 9, ()))
    with torch.no_grad():
        assert torch.equal(plain, model(input_ids=torch.tensor([tokens])).logits[0])
    learn(backend, (), 3, ids(CHUNK, 2))
    learn(backend, (3,), 8, ids(CHUNK, 3))
    c = backend.config
    for slot in (3, 8):
        owner = Owner(model, c.targets, c.rank, c.alpha, backend.adapter(Reads(slot)))
        read = logits(model, backend, tokens, segment(0, 9, (slot,)))
        torch.testing.assert_close(read, owner.logits(tokens), rtol=1e-4, atol=1e-4)
        assert (read - plain).abs().max() > 1e-2


def test_rows_of_a_batch_read_their_own(llama: Any) -> None:
    """Guards the grouping: owners, siblings, rows without an owner and padding in one batch."""
    backend = make_backend(llama, chunk=CHUNK, lr=0.02)
    learn(backend, (), 3, ids(CHUNK, 2))
    learn(backend, (), 5, ids(CHUNK, 3))
    x = torch.randn(9, 32)
    layout = [segment(1, 2, (5,)), segment(3, 1, (3,)), segment(5, 1, (5,)), segment(6, 1, ())]
    plan = backend.begin_step(layout)
    for layer, target in ((0, "q_proj"), (1, "v_proj")):
        out = backend.read(plan, layer, target, x)
        A, B = backend.pools[target]
        for row, slot in enumerate((0, 5, 5, 3, 0, 5, 0, 0, 0)):
            expected = 2.0 * B[layer, slot] @ (A[layer, slot] @ x[row])
            if slot:
                assert_close(out[row], expected, 1e-5)
            else:
                assert not out[row].any()


def test_inner_boundaries_of_a_prefill(model: Any) -> None:
    """Guards the chain: one pass over 2.5 segments equals segment by segment, whoever runs along.

    Rows of each segment read the version before it, and the answer to its last token does too.
    """
    backend = make_backend(model, chunk=CHUNK, lr=0.02)
    tokens, other = ids(15, 4), ids(CHUNK, 5)
    blocks = [(6, 2, tokens[:6]), (12, 4, tokens[6:12])]
    beside = segment(15, CHUNK, (), [(CHUNK, 9, other)])
    plan = backend.begin_step([segment(0, 15, (), blocks), beside])
    out = backend.read(plan, 0, "q_proj", torch.ones(21, 32))
    assert not out[:6].any() and not out[15:].any()
    assert_close(out[6], out[11])
    assert (out[11] - out[12]).abs().max() > 1e-3
    assert backend.finish_step(plan) == [True, True]
    assert [plan.written_pages(i) for i in (0, 1)] == [(2, 4), (9,)]
    learn(backend, (), 12, tokens[:6])
    learn(backend, (12,), 14, tokens[6:12])
    learn(backend, (), 19, other)
    for slot, alone in ((2, 12), (4, 14), (9, 19)):
        expected = backend.adapter(Reads(alone))
        for name, values in backend.adapter(Reads(slot)).items():
            assert_close(values, expected[name], 1e-3, name)


def test_not_selected_boundary_shares_its_predecessor(llama: Any) -> None:
    """Guards the shared slot: nothing is written, rows go on reading what was there."""
    backend = make_backend(llama, chunk=CHUNK, lr=0.02)
    learn(backend, (), 3, ids(CHUNK, 2))
    quiet = make_backend(llama, chunk=CHUNK, tau=50.0)
    quiet.pools = backend.pools
    tokens = ids(14, 6)
    whole = segment(0, 14, (3,), [(6, 7, tokens[:6]), (12, 8, tokens[6:12])])
    plan = quiet.begin_step([whole])
    out = quiet.read(plan, 1, "v_proj", torch.ones(14, 32))
    assert out[0].any()
    assert_close(out[13], out[0])
    assert quiet.finish_step(plan) == [True]
    assert plan.written_pages(0) == plan.unchanged_pages(0) == (7, 8)
    assert plan.updates == 0
    assert quiet.adapter(Reads(7))["v_proj.lora_B"].isnan().all()


@pytest.mark.parametrize("where", ["inner", "deferred"])
def test_a_failing_owner_fails_alone(llama: Any, where: str) -> None:
    """Guards the finite check: an owner whose adapter is NaN fails, the others' bits stay."""
    rows = CHUNK + 2 * (where == "inner")
    good = make_backend(llama, chunk=CHUNK, lr=0.02)
    backends = [good, make_backend(llama, chunk=CHUNK, lr=0.02)]
    learn(good, (), 3, ids(CHUNK, 2))
    for index, backend in enumerate(backends):
        broken = (3,) if index == 0 else (5,)  # slot 5 is poisoned
        plan = backend.begin_step(
            [
                segment(0, rows, (), [(CHUNK, 7, ids(CHUNK, 7))]),
                segment(rows, rows, broken, [(CHUNK, 8, ids(CHUNK, 8))]),
                segment(2 * rows, rows, (), [(CHUNK, 9, ids(CHUNK, 9))]),
            ]
        )
        assert backend.finish_step(plan) == [True, index == 0, True]
        assert plan.written_pages(1) == ((8,) if index == 0 else ())
        assert plan.retried == index
        assert ("not finite" in plan.failed.values()) == (index == 1)
    for slot in (7, 9):
        expected = backends[0].adapter(Reads(slot))
        for name, values in backends[1].adapter(Reads(slot)).items():
            assert torch.equal(values, expected[name])
    assert backends[1].adapter(Reads(8))["q_proj.lora_A"].isnan().all()


def test_rows_after_a_failed_boundary(llama: Any) -> None:
    """Guards the batch: after a failed boundary its owner reads what it read before, not a slot
    that nobody wrote, so no NaN gets into the forward pass.
    """
    backend = make_backend(llama, chunk=CHUNK, lr=0.02)
    learn(backend, (), 3, ids(CHUNK, 2))
    tokens = ids(15, 9)
    whole = segment(0, 15, (3,), [(6, 7, tokens[:6]), (12, 8, tokens[6:12])])

    def here(context: dict[str, Any]) -> bool:
        return bool(context["page"] == 7)

    with faults.armed("write.candidate", faults.not_finite, when=here, times=None):
        plan = backend.begin_step([whole])
        read = backend.read(plan, 1, "v_proj", torch.ones(15, 32))
        assert backend.finish_step(plan) == [False]
    assert read[0].any()
    for row in read:
        assert_close(row, read[0])


def test_a_write_that_raises_is_tried_alone(llama: Any) -> None:
    """Guards the retry: the batch raised, each owner by itself succeeds."""
    backend = make_backend(llama, chunk=CHUNK, lr=0.02)
    both = [
        segment(0, CHUNK, (), [(CHUNK, 3, ids(CHUNK, 2))]),
        segment(CHUNK, CHUNK, (), [(CHUNK, 5, ids(CHUNK, 3))]),
    ]
    calls: list[Any] = []

    def fail_once(context: dict[str, Any]) -> None:
        calls.append(context["pages"])
        if len(calls) == 1:
            raise RuntimeError("out of memory")

    with faults.armed("write.batch", fail_once, times=None):
        plan = backend.begin_step(both)
        assert backend.finish_step(plan) == [True, True]
    assert calls == [[3, 5], [3], [5]] and plan.retried == 2
    again = make_backend(llama, chunk=CHUNK, lr=0.02)
    learn(again, (), 3, ids(CHUNK, 2))
    assert torch.equal(
        backend.adapter(Reads(3))["v_proj.lora_B"], again.adapter(Reads(3))["v_proj.lora_B"]
    )


def test_groups_are_bounded(llama: Any) -> None:
    """Guards the size of a WRITE group: smaller groups, the same adapters."""
    whole, parts = (make_backend(llama, chunk=CHUNK, lr=0.02) for _ in range(2))
    parts.write_group = 2
    for backend in (whole, parts):
        rows = [segment(i * CHUNK, CHUNK, (), [(CHUNK, i + 1, ids(CHUNK, i))]) for i in range(5)]
        assert backend.finish_step(backend.begin_step(rows)) == [True] * 5
    for slot in range(1, 6):
        expected = whole.adapter(Reads(slot))
        for name, values in parts.adapter(Reads(slot)).items():
            assert_close(values, expected[name], 1e-3, name)


def test_refusals(llama: Any) -> None:
    """Guards against a step that cannot be meant."""
    backend = make_backend(llama, chunk=CHUNK)
    with pytest.raises(ValueError, match="1 boundaries, evidence of 0"):
        backend.begin_step([segment(0, CHUNK, (), [(CHUNK, 3, [1, 2])])._replace(evidence=())])
    plan = backend.begin_step([segment(0, 2, ())])
    backend.finish_step(plan)
    with pytest.raises(RuntimeError, match="ran already"):
        backend.finish_step(plan)
    with pytest.raises(ValueError, match="do not hold a segment of 6"):
        make_backend(llama, chunk=CHUNK, train_tokens=5)
    with pytest.raises(ValueError, match="lora_delta: targets is"):
        make_backend(llama, targets=("q_proj", "lm_head"))
    with pytest.raises(ValueError, match="lora_delta: chunk is 1"):
        make_backend(llama, chunk=1)
