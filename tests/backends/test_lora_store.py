"""The LoRA backend behind the real store: lineages against PEFT, one token at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.lineage import root_id
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.slots import SlotPool
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.store import TTTStateStore
from sgl_rwttt.testing.memory import PoisonedPool
from tests.backends.lora_oracle import VOCAB, Owner, tiny_model
from tests.backends.lora_rig import Reads, make_backend, reading

CHUNK, LR, TAU = 5, 0.02, 4.8
R, W = Effect.READ, Effect.WRITE
Items = list[tuple[int, Effect]]


class Rig:
    """One model, its backend and a store; freed adapters hold NaN at all times."""

    def __init__(self, slots: int = 16) -> None:
        self.model = tiny_model("qwen3")
        self.backend = make_backend(self.model, slots=slots, chunk=CHUNK, lr=LR, tau=TAU)
        self.pool = PoisonedPool(slots, "adapter", self.backend.poison)
        self.root = root_id("tiny", self.backend.config.rule)
        self.store = TTTStateStore(
            self.pool, SlotPool(1, "base"), CHUNK, 0, self.root, self.backend.copy_rows, "tokens"
        )
        self.updates = 0

    def create(self, name: str, items: Items = ()) -> tuple[OwnerState, int]:
        tokens, spans = [token for token, _ in items], spans_of(list(items))
        match = self.store.match(self.root, tokens, spans, len(tokens))
        state = self.store.create("a", name, match, self.root, tokens, spans)
        return state, match.depth

    @torch.no_grad()
    def run(self, state: OwnerState, done: Items, new: Items, cache: Any) -> tuple[Tensor, Any]:
        """One forward pass of ``new``: logits [n, vocab], cache."""
        tokens = [token for token, _ in new]
        candidate = self.store.begin_write(state, tokens, spans_of(done + new), 0)
        plan = self.backend.begin_step([candidate.segment])
        with reading(self.model, self.backend, plan):
            answer = self.model(
                input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True
            )
        assert self.backend.finish_step(plan) == [True]
        kept = plan.unchanged_pages(0)
        for page in plan.written_pages(0):
            candidate.mark_written(page, changed=page not in kept)
        self.store.commit(candidate)
        self.store.check_integrity()
        self.updates += plan.updates
        return answer.logits[0], answer.past_key_values


def spans_of(items: Items) -> ModeSpans:
    spans = ModeSpans()
    for _, mode in items:
        spans.append(1, mode)
    return spans


def replay(rig: Rig, items: Items) -> tuple[Tensor, Owner, int]:
    """(logits per token, the owner at the end, boundaries learnt) with PEFT, token by token."""
    c, evidence, rows, cache, updates = rig.backend.config, [], [], None, 0
    owner = Owner(rig.model, c.targets, c.rank, c.alpha, rig.backend.adapter(Reads()))
    for token, mode in items:
        logits, cache = owner.feed(token, cache)
        rows.append(logits)
        evidence += [token] if mode is W else []
        if len(evidence) == CHUNK:
            updates += owner.boundary(evidence, LR, TAU, c.weight, c.steps)[1]
            evidence = []
    return torch.stack(rows), owner, updates


def some(seed: int, count: int) -> Items:
    """Mostly WRITE tokens, with READ tokens among them."""
    rng = random.Random(seed)
    return [(rng.randrange(VOCAB), R if rng.random() < 0.15 else W) for _ in range(count)]


@pytest.fixture(scope="module")
def rig() -> Rig:
    return Rig()


def test_any_cut_of_a_context(rig: Rig) -> None:
    """Guards evidence, chaining and shared slots: wherever a forward pass ends, PEFT agrees."""
    items = some(1, 33)
    expected, owner, learnt = replay(rig, items)
    assert 0 < learnt < 5, "boundaries of both kinds must occur"
    for cuts in ([33], [4, 5, 12, 33], list(range(1, 34))):
        before = rig.updates
        state, _ = rig.create(f"cut {len(cuts)}")
        rows, cache, at = [], None, 0
        for end in cuts:
            logits, cache = rig.run(state, items[:at], items[at:end], cache)
            rows.append(logits)
            at = end
        torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-3, atol=2e-3)
        for name, values in rig.backend.adapter(state.version).items():
            torch.testing.assert_close(values, owner.tensors()[name], rtol=1e-3, atol=1e-4)
        assert rig.updates - before == learnt
        assert state.version.number == sum(mode is W for _, mode in items) // CHUNK
        rig.store.release(state)
        rig.store.flush()
        assert rig.pool.live == 0


def test_fork_and_rollback(rig: Rig) -> None:
    """Guards sharing: twins diverge from one point, and an earlier point is taken up again."""
    items = some(1, 22)
    state, _ = rig.create("main")
    rig.run(state, [], items, None)
    learnt = replay(rig, items)[2]
    assert (rig.pool.live, state.tail) == (learnt, None) and learnt > 0
    twin = rig.store.fork(state, "a", "twin")
    left, right = some(3, 9), some(4, 9)
    for branch, more in ((state, left), (twin, right)):
        expected, _, _ = replay(rig, items + more)
        logits, _ = rig.run(branch, items, more, copied(rig, items))
        torch.testing.assert_close(logits, expected[22:], rtol=1e-3, atol=2e-3)
    back = items[:13] + right
    early, depth = rig.create("early", items[:13])
    assert depth == 13, "a point between boundaries needs nothing retained but its version"
    expected, _, _ = replay(rig, back)
    logits, _ = rig.run(early, items[:13], right, copied(rig, items[:13]))
    torch.testing.assert_close(logits, expected[13:], rtol=1e-3, atol=2e-3)
    for branch in (state, twin, early):
        rig.store.release(branch)
    rig.store.flush()
    rig.store.check_integrity()
    assert rig.pool.live == 0


def copied(rig: Rig, items: Items) -> Any:
    """A KV cache of the context, by a cold run in a store of its own."""
    fresh = Rig()
    state, _ = fresh.create("cold")
    return fresh.run(state, [], items, None)[1]
