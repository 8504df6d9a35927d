"""TTT-Linear: the inner gradient against autograd, the dual form against the decode form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sgl_rwttt.kernels.ttt_linear import naive
from sgl_rwttt.kernels.ttt_linear.torch_impl import mini_batch, next_state
from tests.assert_close import assert_close

C, HEADS, OWNERS = 16, 3, 3


def test_inner_gradient_against_autograd() -> None:
    """Guards: a term of the norm's derivative that is left out."""
    torch.manual_seed(0)
    z, target, gamma, beta = (torch.randn(HEADS, 8).double() for _ in range(4))
    z.requires_grad_()
    loss = 0.5 * (F.layer_norm(z, (8,), eps=1e-6) * gamma + beta - target).square().sum()
    (expected,) = torch.autograd.grad(loss, z)
    assert_close(naive.inner_gradient(z.detach(), target, gamma, beta), expected, 1e-12)


class Stream:
    """One owner's mini-batch, token by token in the decode form."""

    def __init__(self, f: int, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g).double()

        self.qkv = draw(3, C, HEADS, f)
        self.rate = draw(C, HEADS).sigmoid() / f
        self.state = draw(HEADS, f, f) / f**0.5, draw(HEADS, f)

    def decode(
        self, tau: Tensor, norm: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs [C, heads, f] and the next state."""
        tail = torch.zeros_like(self.state[0]), torch.zeros_like(self.state[1])
        rows = []
        for i in range(C):
            q, k, v = self.qkv[:, i]
            out, tail = naive.decode_token(
                q, k, v, self.rate[i], float(tau[i]), self.state, tail, *norm
            )
            rows.append(out)
        return torch.stack(rows), naive.next_state(self.state, tail, float(tau[-1]))


class Batch:
    """Several streams in the dual form; tails stand in NaN."""

    def __init__(self, f: int) -> None:
        torch.manual_seed(1)
        self.streams = [Stream(f, seed) for seed in range(OWNERS)]
        self.norm = torch.randn(HEADS, f).double(), torch.randn(HEADS, f).double()
        self.tau = (1.0 / torch.arange(1, C + 1) + 0.01 * torch.randn(C)).double()
        self.state = tuple(torch.stack([s.state[i] for s in self.streams]) for i in range(2))
        self.tail = torch.full((2, OWNERS, HEADS, C, f), torch.nan).double()

    def step(self, held: list[int], count: int, own_only: bool = False) -> tuple[Tensor, Tensor]:
        """Answer ``count`` tokens of each stream after ``held`` ones of its own."""
        picked = torch.stack(
            [s.qkv[:, h : h + count] for s, h in zip(self.streams, held, strict=True)], 1
        ).transpose(2, 3)
        rate = torch.stack(
            [s.rate[h : h + count] for s, h in zip(self.streams, held, strict=True)]
        ).transpose(1, 2)
        at = torch.tensor(held)[:, None] + (0 if own_only else torch.arange(count))
        tau = self.tau[at.expand(OWNERS, count)]
        reading = torch.full((OWNERS,), own_only)
        rows = torch.tensor(held)
        qkv, tail = tuple(picked), tuple(self.tail)
        return mini_batch(qkv, rate, tau, self.state, tail, rows, reading, self.norm)

    def keep(self, held: list[int], y: Tensor) -> None:
        for i, h in enumerate(held):
            k = self.streams[i].qkv[1, h : h + y.shape[2]].transpose(0, 1)
            self.tail[0, i, :, h : h + y.shape[2]] = k
            self.tail[1, i, :, h : h + y.shape[2]] = y[i]


@pytest.mark.parametrize("f", [2, 16, 63])
def test_dual_form_is_decode_form_at_every_split(f: int) -> None:
    """Guards: masks that are off by one, free tail rows that are looked at, wrong tau of a part."""
    batch = Batch(f)
    expected = [s.decode(batch.tau, batch.norm) for s in batch.streams]
    for split in range(C + 1):
        batch.tail.fill_(torch.nan)
        parts = []
        for first, count in ((0, split), (split, C - split)):
            if count:
                out, y = batch.step([first] * OWNERS, count)
                batch.keep([first] * OWNERS, y)
                parts.append(out)
        W, b = next_state(*batch.state, *batch.tail, float(batch.tau[-1]))
        for i, (rows, (next_W, next_b)) in enumerate(expected):
            assert_close(torch.cat(parts, 2)[i].transpose(0, 1), rows, 1e-12, f"split {split}")
            assert_close(W[i], next_W, 1e-12)
            assert_close(b[i], next_b, 1e-12)


def test_owners_at_different_offsets() -> None:
    """Guards: one offset for the whole batch, as in the published code."""
    batch = Batch(16)
    expected = [s.decode(batch.tau, batch.norm)[0] for s in batch.streams]
    for i in range(C):
        batch.keep([i] * OWNERS, batch.step([i] * OWNERS, 1)[1])
    held = [0, 7, 15]
    out, _ = batch.step(held, 1)
    for i, h in enumerate(held):
        assert_close(out[i, :, 0], expected[i][h], 1e-12, f"offset {h}")


def test_reading_tokens_see_the_tail_and_themselves() -> None:
    """Guards: READ tokens that learn from each other."""
    batch = Batch(16)
    expected = [s.decode(batch.tau, batch.norm)[0] for s in batch.streams]
    _, y = batch.step([0] * OWNERS, 5)
    batch.keep([0] * OWNERS, y)
    out, _ = batch.step([5] * OWNERS, 4, own_only=True)
    for i in range(OWNERS):
        assert_close(out[i, :, 0], expected[i][5], 1e-12)
        assert (out[i, :, 1] - expected[i][6]).abs().max() > 1e-3
    alone, _ = batch.step([5] * OWNERS, 1)
    assert_close(out[:, :, :1], alone, 1e-12)
