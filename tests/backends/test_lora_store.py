"""The LoRA backend behind the real store: lineages against PEFT, one token at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_rwttt.backends.lora_slots import initial_adapter
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

    def __init__(self, slots: int = 16, ranks: tuple[int, ...] = (8,), tau: float = TAU) -> None:
        self.model = tiny_model("qwen3")
        self.backend = make_backend(
            self.model, slots=slots, ranks=ranks, chunk=CHUNK, lr=LR, tau=tau
        )
        self.pool = PoisonedPool(slots, "adapter", self.backend.poison)
        self.roots = [root_id("tiny", config.rule) for config in self.backend.configs]
        self.store = TTTStateStore(
            self.pool,
            SlotPool(1, "base"),
            CHUNK,
            0,
            self.roots[0],
            self.backend.copy_rows,
            "tokens",
            {root: (self.backend.start + i,) for i, root in enumerate(self.roots) if i},
        )
        self.updates = 0

    def create(self, name: str, items: Items = (), form: int = 0) -> tuple[OwnerState, int]:
        tokens, spans, root = [t for t, _ in items], spans_of(list(items)), self.roots[form]
        match = self.store.match(root, tokens, spans, len(tokens))
        state = self.store.create("a", name, match, root, tokens, spans)
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


def replay(rig: Rig, items: Items, form: int = 0) -> tuple[Tensor, Owner, int]:
    """(logits per token, the owner at the end, boundaries learnt) with PEFT, token by token."""
    c, evidence, rows, cache, updates = rig.backend.configs[form], [], [], None, 0
    owner = Owner(rig.model, c.targets, c.rank, c.alpha, initial_adapter(c, "tiny"))
    for token, mode in items:
        logits, cache = owner.feed(token, cache)
        rows.append(logits)
        evidence += [token] if mode is W else []
        if len(evidence) == CHUNK:
            updates += owner.boundary(evidence, LR, c.tau, c.weight, c.steps)[1]
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


def test_two_ranks_in_one_pool() -> None:
    """Guards: a rank read or trained with the other's scale or width, in slots that both use in
    turn, behind rows of NaN. Rank 3 is the smaller one, and the default.
    """
    rig, total = Rig(slots=4, ranks=(3, 8)), 0
    assert rig.backend.page_bytes == 4 * rig.backend.configs[1].adapter_numbers
    for turn in range(3):
        for form in (0, 1):
            items = some(10 * turn + form, 37)
            expected, owner, learnt = replay(rig, items, form)
            state, _ = rig.create(f"{turn} {form}", form=form)
            assert rig.backend.form_of(state.version.pages) == form
            rows, cache = [], None
            for first in range(0, 37, 6):
                logits, cache = rig.run(state, items[:first], items[first : first + 6], cache)
                rows.append(logits)
            torch.testing.assert_close(torch.cat(rows), expected, rtol=1e-3, atol=2e-3)
            for name, values in rig.backend.adapter(state.version).items():
                torch.testing.assert_close(values, owner.tensors()[name], rtol=1e-3, atol=1e-4)
            assert rig.backend.form_of(state.version.pages) == form
            rig.store.release(state)
            total += learnt
    assert total > 6, total
    assert rig.store.stats()["evictions"] > 2
    rig.store.flush()
    rig.store.check_integrity()
    assert rig.pool.live == 0


def test_ranks_of_one_batch() -> None:
    """Guards the grouping: owners of two ranks in one forward pass, at boundaries together."""
    rig = Rig(ranks=(8, 3), tau=0.0)
    prompts = [[(token, W) for token, _ in some(20 + i, 10)] for i in range(4)]
    states = [rig.create(f"{i}", form=i % 2)[0] for i in range(4)]
    candidates = [
        rig.store.begin_write(state, [token for token, _ in items], spans_of(items), 10 * i)
        for i, (state, items) in enumerate(zip(states, prompts, strict=True))
    ]
    plan = rig.backend.begin_step([candidate.segment for candidate in candidates])
    assert list(plan.reads) == [0, 1]
    assert rig.backend.finish_step(plan) == [True] * 4 and plan.updates == 8
    for i, (candidate, items) in enumerate(zip(candidates, prompts, strict=True)):
        kept = plan.unchanged_pages(i)
        for page in plan.written_pages(i):
            candidate.mark_written(page, changed=page not in kept)
        rig.store.commit(candidate)
        owner = replay(rig, items, i % 2)[1]
        for name, values in rig.backend.adapter(states[i].version).items():
            torch.testing.assert_close(values, owner.tensors()[name], rtol=1e-3, atol=1e-4)


def test_a_rank_moves_with_its_payload() -> None:
    """Guards export and restore: the form is that of the tensors, and another's is refused."""
    rig = Rig(ranks=(8, 3), tau=0.0)
    state, _ = rig.create("a", form=1)
    assert rig.backend.export(state.version) == {}
    rig.run(state, [], some(31, 3 * CHUNK), None)
    assert state.version.pages
    tensors = rig.backend.export(state.version)
    assert {k: v.shape for k, v in tensors.items()} == {
        k: shape for k, (_, shape) in rig.backend.forms[1].layout(1, False).items()
    }
    rig.backend.poison(7)
    rig.backend.restore(tensors, None, (7,))
    assert rig.backend.form_of((7,)) == 1
    again = rig.backend.export(Reads(7))
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    with pytest.raises(ValueError, match=r"q_proj\.lora_A is"):
        Rig(ranks=(8, 2)).backend.restore(tensors, None, (7,))
    with pytest.raises(ValueError, match="each may occur once"):
        Rig(ranks=(8, 8))
