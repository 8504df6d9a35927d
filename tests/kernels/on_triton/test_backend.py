"""The In-Place backend on the Triton kernels against a dense loop, one token at a time."""

from __future__ import annotations

import os

import pytest
import torch

from sgl_rwttt.core.effects import Effect
from tests.assert_close import assert_close
from tests.backends.in_place_rig import Rig, some_tokens


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the rig is on the CPU")
@pytest.mark.parametrize("fold", [0, 2])
def test_prefill_and_decode(fold: int) -> None:
    """Guards: kernels that are right alone but are handed other plans, slots or strides."""
    rig = Rig(chunk=4, fold_pages=fold)
    contexts = [some_tokens(14, seed=1), some_tokens(11, seed=2)]
    states = [rig.start(f"owner-{i}") for i in range(2)]
    cuts = [(0, 11, 12, 14), (0, 5, 8, 11)]  # boundaries inside a forward and at its end
    deltas: list[list[torch.Tensor]] = [[], []]
    for step in range(3):
        parts = [c[k[step] : k[step + 1]] for c, k in zip(contexts, cuts, strict=True)]
        writes = [(s, p, Effect.WRITE) for s, p in zip(states, parts, strict=True)]
        for part, new in zip(deltas, rig.forward(writes, rows=[1, 0], padding=2), strict=True):
            part.append(new)
    for tokens, parts in zip(contexts, deltas, strict=True):
        assert_close(torch.cat(parts, 1), rig.expected(tokens), 1e-5)
