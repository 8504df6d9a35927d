"""The in-place backend behind the real store, fed with made-up activations.

Every token has fixed h and target rows per layer, so that the state is a function of the tokens as
in a model, without one. All free pages and bases, and both dummies, hold NaN at all times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_rwttt.backends.in_place import InPlaceBackend, InPlaceConfig
from sgl_rwttt.backends.in_place_plan import StepPlan
from sgl_rwttt.core.candidate import Candidate
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.lineage import root_id
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.store import TTTStateStore
from sgl_rwttt.testing.memory import PoisonedPool
from tests.backends.oracle import InPlaceOracle

VOCAB = 50


class Rig:
    """A backend, a store and the tokens' activations."""

    def __init__(
        self,
        chunk: int = 4,
        fold_pages: int = 0,
        d_model: int = 12,
        d_ff: int = 20,
        layers: int = 2,
        proj: bool = True,
        pages: int = 80,
        bases: int = 24,
        lr: float = 0.05,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        self.config = InPlaceConfig(
            tuple(range(layers)), chunk, lr, proj, "hidden_states", d_model, d_ff
        )
        self.h = torch.randn(layers, VOCAB, d_ff, generator=g) / d_ff**0.5
        self.t = torch.randn(layers, VOCAB, d_model, generator=g)
        self.conv = torch.randn(layers, d_model, 1, 5, generator=g)
        self.proj = torch.randn(layers, d_model, d_model, generator=g) / d_model**0.5
        self.backend = InPlaceBackend(self.config, pages, bases, dtype=dtype)
        for slot in range(layers):
            self.backend.set_weights(slot, self.conv[slot], self.proj[slot] if proj else None)
        self.root = root_id("rig", self.config.rule)
        self.store = TTTStateStore(
            PoisonedPool(pages, "pages", self.backend.poison),
            PoisonedPool(bases, "bases", self.backend.poison_base),
            chunk,
            fold_pages,
            self.root,
            self.backend.copy_rows,
        )

    def start(
        self, owner: str, tokens: Sequence[int] = (), modes: ModeSpans | None = None
    ) -> OwnerState:
        """A branch at the deepest retained point of ``tokens``."""
        modes = modes if modes is not None else ModeSpans(len(tokens))
        match = self.store.match(self.root, tokens, modes, len(tokens))
        return self.store.create(owner, "b", match, self.root, tokens, modes)

    def begin(
        self,
        writes: Sequence[tuple[OwnerState, Sequence[int], ModeSpans | Effect]],
        rows: Sequence[int] | None = None,
    ) -> list[Candidate]:
        """Candidates of one forward; ``rows`` is the order of the owners in the batch."""
        starts, at = {}, 0
        for index in range(len(writes)) if rows is None else rows:
            starts[index] = at
            at += len(writes[index][1])
        return [
            self.store.begin_write(state, tokens, modes, starts[i])
            for i, (state, tokens, modes) in enumerate(writes)
        ]

    def layers(
        self,
        candidates: Sequence[Candidate],
        tokens: Sequence[Sequence[int]],
        spoil: dict[int, str] | None = None,
        padding: int = 0,
    ) -> tuple[StepPlan, list[Tensor]]:
        """The forward without its end: the plan, and per owner the deltas [L, n, d].

        ``spoil`` puts NaN into the last h ("h") or target ("t") row of an owner in layer 0.
        ``padding`` rows of NaN follow the batch.
        """
        segments = [candidate.segment for candidate in candidates]
        flat = torch.zeros(sum(s.count for s in segments), dtype=torch.int64)
        for segment, ids in zip(segments, tokens, strict=True):
            flat[segment.start : segment.start + segment.count] = torch.tensor(list(ids))
        plan, outs = self.backend.begin_step(segments), []
        for slot in range(len(self.config.layers)):
            h, t = self.h[slot, flat], self.t[slot, flat]
            for index, which in (spoil or {}).items():
                last = segments[index].start + segments[index].count - 1
                if slot == 0:
                    (h if which == "h" else t)[last, 0] = torch.nan
            out = self.backend.layer_step(plan, slot, _padded(h, padding), _padded(t, padding))
            assert not out[len(flat) :].any(), "padded rows got a delta"
            outs.append(out)
        stacked = torch.stack(outs)
        return plan, [stacked[:, s.start : s.start + s.count] for s in segments]

    def run(
        self,
        candidates: Sequence[Candidate],
        tokens: Sequence[Sequence[int]],
        spoil: dict[int, str] | None = None,
        padding: int = 0,
    ) -> tuple[StepPlan, list[bool], list[Tensor]]:
        """The whole forward: also the judgement per owner."""
        plan, deltas = self.layers(candidates, tokens, spoil, padding)
        return plan, self.backend.finish_step(plan), deltas

    def settle(self, plan: StepPlan, good: Sequence[bool], candidates: Sequence[Candidate]) -> None:
        """Commit what was written, drop the rest, and audit the store."""
        for index, candidate in enumerate(candidates):
            for page in plan.written_pages(index):
                candidate.mark_written(page)
            if good[index]:
                self.store.commit(candidate)
            else:
                self.store.drop(candidate)
        self.store.check_integrity()

    def forward(
        self,
        writes: Sequence[tuple[OwnerState, Sequence[int], ModeSpans | Effect]],
        rows: Sequence[int] | None = None,
        padding: int = 0,
    ) -> list[Tensor]:
        """One forward of several owners, committed; per owner the deltas [L, n, d]."""
        candidates = self.begin(writes, rows)
        plan, good, deltas = self.run(candidates, [w[1] for w in writes], padding=padding)
        assert all(good)
        self.settle(plan, good, candidates)
        return deltas

    def write(self, state: OwnerState, tokens: Sequence[int]) -> Tensor:
        """One forward of one owner in write mode."""
        return self.forward([(state, tokens, Effect.WRITE)])[0]

    def oracles(self) -> list[InPlaceOracle]:
        """A fresh oracle per layer."""
        c = self.config
        return [
            InPlaceOracle(
                self.conv[slot], self.proj[slot] if c.proj else None, c.lr, c.chunk, c.d_ff
            )
            for slot in range(len(c.layers))
        ]

    def expected(self, tokens: Sequence[int], modes: ModeSpans | None = None) -> Tensor:
        """The oracle's deltas [L, n, d] for a whole context."""
        modes = modes if modes is not None else ModeSpans(len(tokens))
        out = torch.zeros(len(self.config.layers), len(tokens), self.config.d_model)
        for slot, oracle in enumerate(self.oracles()):
            for i, token in enumerate(tokens):
                write = modes.mode_at(i) is Effect.WRITE
                out[slot, i] = oracle.step(self.h[slot, token], self.t[slot, token], write)
        return out


def some_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids."""
    g = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(VOCAB, (count,), generator=g).tolist()


def _padded(rows: Tensor, count: int) -> Tensor:
    return torch.cat([rows, rows.new_full((count, rows.shape[1]), torch.nan)])
