"""The streaming backend and its model behind the real store, on a golden checkpoint.

All free pages and bases, and the dummy page, hold NaN at all times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sgl_rwttt.backends.streaming import StreamingBackend, StreamingConfig
from sgl_rwttt.backends.streaming_model import PlannedStep, StreamingModel
from sgl_rwttt.backends.streaming_plan import StreamingPlan
from sgl_rwttt.core.candidate import Candidate
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.lineage import root_id
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.store import TTTStateStore
from sgl_rwttt.testing.memory import PoisonedPool
from tests.golden_streaming import StreamingCase

Write = tuple[OwnerState, Sequence[int], "ModeSpans | Effect"]


class StreamingRig:
    """A model, its backend and a store."""

    def __init__(
        self, case: StreamingCase, pages: int = 80, bases: int = 80, fold_pages: int = 1
    ) -> None:
        self.config = StreamingConfig.from_hf(case.config)
        weights = case.weights()
        self.head = weights.pop("lm_head.weight")
        self.model = StreamingModel(self.config)
        self.model.load_state_dict({k.removeprefix("model."): v for k, v in weights.items()})
        self.backend = StreamingBackend(self.config, pages, bases)
        self.model.hand_over(self.backend)
        self.root = root_id("rig", self.config.rule)
        self.store = TTTStateStore(
            PoisonedPool(pages, "pages", self.backend.poison),
            PoisonedPool(bases, "bases", self.backend.poison_base),
            self.config.chunk,
            fold_pages,
            self.root,
            self.backend.copy_rows,
        )
        self._names = 0

    def start(self, tokens: Sequence[int] = (), modes: ModeSpans | None = None) -> OwnerState:
        """A branch at the deepest retained point of ``tokens``."""
        modes = modes if modes is not None else ModeSpans(len(tokens))
        match = self.store.match(self.root, tokens, modes, len(tokens))
        self._names += 1
        return self.store.create(f"o{self._names}", "b", match, self.root, tokens, modes)

    def begin(self, writes: Sequence[Write]) -> list[Candidate]:
        """Candidates of one forward, in the order of the batch."""
        found, at = [], 0
        for state, tokens, modes in writes:
            found.append(self.store.begin_write(state, tokens, modes, at))
            at += len(tokens)
        return found

    @torch.no_grad()
    def run(
        self, candidates: Sequence[Candidate], writes: Sequence[Write], padding: int = 0
    ) -> tuple[StreamingPlan, list[Tensor]]:
        """The forward without its end: the plan and each owner's logits [n, vocab]."""
        plan = self.backend.begin_step([c.segment for c in candidates])
        ids = torch.tensor([t for _, tokens, _ in writes for t in tokens] + [0] * padding)
        logits = self.model(ids, PlannedStep(self.backend, plan)) @ self.head.T
        return plan, [logits[c.segment.start :][: c.segment.count] for c in candidates]

    def settle(self, plan: StreamingPlan, candidates: Sequence[Candidate]) -> list[bool]:
        """Finish, commit what was written, drop the rest, and audit the store."""
        good = self.backend.finish_step(plan)
        for index, candidate in enumerate(candidates):
            for page in plan.written_pages(index):
                candidate.mark_written(page)
            if good[index]:
                self.store.commit(candidate)
            else:
                self.store.drop(candidate)
        self.store.check_integrity()
        return good

    def forward(self, *writes: Write, padding: int = 0) -> list[Tensor]:
        """One forward of several owners, committed; per owner its logits [n, vocab]."""
        candidates = self.begin(writes)
        plan, logits = self.run(candidates, writes, padding)
        assert all(self.settle(plan, candidates))
        return logits

    def write(self, state: OwnerState, tokens: Sequence[int]) -> Tensor:
        """One forward of one owner in write mode."""
        return self.forward((state, tokens, Effect.WRITE))[0]

    def read(self, state: OwnerState, tokens: Sequence[int]) -> Tensor:
        """One forward of one owner in read mode."""
        return self.forward((state, tokens, Effect.READ))[0]
