"""The toy rule passes the conformance suite of sgl_rwttt."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from running_mean import RunningMean

from sgl_rwttt.backends import backend_class
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.testing.backend_conformance import CHECKS

LAYERS, WIDTH, LR = 2, 6, 0.5


class RunningMeanCase:
    """A model whose layers see one fixed target per token; its outputs are the layers' answers."""

    chunk, evidence, vocab, tolerance = 4, "rows", 20, 1e-5

    def __init__(self, fold_pages):
        self.fold_pages = fold_pages
        generator = torch.Generator().manual_seed(0)
        self.targets = torch.randn(LAYERS, self.vocab, WIDTH, generator=generator)

    def make(self, pages, bases):
        return RunningMean(LAYERS, WIDTH, self.chunk, LR, pages, bases)

    def forward(self, backend, plan, batch):
        targets = self.targets[:, batch.tokens()]
        return torch.stack(
            [backend.layer_step(plan, slot, None, targets[slot]) for slot in range(LAYERS)], dim=1
        )

    def oracle(self, tokens, modes):
        """One token at a time, from the definition: no pages, no batch."""
        answers, chunks, tail = [], [], []
        for token, mode in zip(tokens, modes, strict=True):
            past = torch.stack([t for chunk in chunks for t in chunk]) if chunks else None
            answers.append(torch.zeros(LAYERS, WIDTH) if past is None else LR * past.mean(0))
            tail += [self.targets[:, token]] if mode is Effect.WRITE else []
            if len(tail) == self.chunk:
                chunks.append(tail)
                tail = []
        return torch.stack(answers)

    def poison(self, backend, kind, slot):
        (backend.rows if kind == "page" else backend.sums)[:, slot] = torch.nan

    @contextmanager
    def spoil(self, backend, token):
        kept = self.targets[1, token].clone()
        self.targets[1, token, 3] = torch.nan
        yield
        self.targets[1, token] = kept


@pytest.mark.parametrize("fold_pages", [0, 1, 2])
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_conformance(check, fold_pages):
    """A rule that mixes up owners, loses evidence or writes where it must not."""
    check(RunningMeanCase(fold_pages))


def test_found_by_name():
    """A distribution whose entry point names something else."""
    assert backend_class("running_mean") is RunningMean
