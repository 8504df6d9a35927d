"""Random lives of many branches against the eager loop: batches, modes, forks, restarts."""

from __future__ import annotations

import random

import pytest
import torch

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.spans import ModeSpans
from tests.backends.streaming_oracle import EagerTTT
from tests.backends.streaming_rig import StreamingRig
from tests.golden_streaming import NAMES, StreamingCase, streaming_case

STEPS, BRANCHES = 40, 5


class Branch:
    """A running branch, what it has read, and its twin in the eager loop."""

    def __init__(self, state: OwnerState, tokens: list[int], modes: ModeSpans, twin: EagerTTT):
        self.state, self.tokens, self.modes, self.twin = state, tokens, modes, twin


class Walk:
    """Branches of one rig, driven by one seed."""

    def __init__(self, case: StreamingCase, seed: int) -> None:
        self.case, self.rng = case, random.Random(seed)
        self.rig = StreamingRig(case, pages=40, bases=self.rng.choice([3, 6, 40]))
        self.branches: list[Branch] = []
        self.compared = 0

    def step(self) -> None:
        choice = self.rng.random()
        if not self.branches or (choice < 0.15 and len(self.branches) < BRANCHES):
            self.branches.append(Branch(self.rig.start(), [], ModeSpans(), EagerTTT(self.case)))
        elif choice < 0.25 and len(self.branches) < BRANCHES:
            self.fork(self.rng.choice(self.branches))
        elif choice < 0.35:
            self.restart(self.rng.choice(self.branches))
        elif choice < 0.4:
            self.rig.store.flush()
        else:
            self.forward()

    def forward(self) -> None:
        """Some of the branches read and write some tokens in one batch."""
        chosen = self.rng.sample(self.branches, self.rng.randint(1, len(self.branches)))
        writes, expected = [], []
        for branch in chosen:
            new: list[int] = []
            rows = []
            for _ in range(self.rng.choice([1, 1, 2, 3])):
                mode = self.rng.choice([Effect.WRITE, Effect.WRITE, Effect.READ])
                run = [self.rng.randrange(128) for _ in range(self.rng.choice([1, 1, 5, 19]))]
                branch.modes.append(len(run), mode)
                new += run
                rows.append(branch.twin.feed(run, mode is Effect.WRITE))
            branch.tokens += new
            writes.append((branch.state, new, branch.modes))
            expected.append(torch.cat(rows))
        for got, rows in zip(
            self.rig.forward(*writes, padding=self.rng.randrange(3)), expected, strict=True
        ):
            assert (got - rows).abs().max() < 1e-4
            self.compared += len(rows)

    def fork(self, branch: Branch) -> None:
        name = f"fork{self.rng.random()}"
        state = self.rig.store.fork(branch.state, name, "b")
        modes = branch.modes.slice(len(branch.tokens))
        self.branches.append(Branch(state, list(branch.tokens), modes, branch.twin.copy()))

    def restart(self, branch: Branch) -> None:
        """Leave, and come back at whatever is retained of a prefix."""
        self.rig.store.release(branch.state)
        keep = self.rng.randint(0, len(branch.tokens))
        branch.tokens, branch.modes = branch.tokens[:keep], branch.modes.slice(keep)
        branch.state = self.rig.start(branch.tokens, branch.modes)
        depth = branch.state.clock.position
        branch.tokens, branch.modes = branch.tokens[:depth], branch.modes.slice(depth)
        branch.twin = EagerTTT(self.case)
        for first, end, mode in branch.modes.runs(0, depth):
            branch.twin.feed(branch.tokens[first:end], mode is Effect.WRITE)

    def end(self) -> None:
        for branch in self.branches:
            self.rig.store.release(branch.state)
        self.rig.store.flush()
        self.rig.store.check_integrity()
        stats = self.rig.store.stats()
        assert stats["pages_live"] == stats["bases_live"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(2))
def test_random_walk(name: str, seed: int) -> None:
    """Guards: any order of operations in which one branch's state reaches another, or is lost."""
    walk = Walk(streaming_case(name), seed)
    for _ in range(STEPS):
        walk.step()
    walk.end()
    assert walk.compared > 100
