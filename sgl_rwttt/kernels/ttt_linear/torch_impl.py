"""TTT-Linear in the dual form: rows of one mini-batch at a time, batched over owners.

The tail is kept as rows, not as accumulators: k_j and y_j = lambda_j g_j of every token since the
mini-batch began, so that G_i = sum_{j <= i} k_j^T y_j. Rows are as exact, any prefix of them is the
tail at an earlier token, and for f > 32 they are smaller. Source: Sun et al. 2025, section 2.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-6


def mini_batch(
    qkv: tuple[Tensor, Tensor, Tensor],
    rate: Tensor,
    tau: Tensor,
    state: tuple[Tensor, Tensor],
    tail: tuple[Tensor, Tensor],
    held: Tensor,
    own_only: Tensor,
    norm: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Answer c new tokens of each of G owners; returns (out, y), both [G, heads, c, f].

    q, k, v [G, heads, c, f]; rate [G, heads, c] is lambda; tau [G, c] is of each token's offset.
    ``state`` is that of the mini-batch's start: W [G, heads, f, f], b [G, heads, f]. ``tail`` is
    the rows k, y [G, heads, C, f], of which ``held`` [G] count and the others are not looked at. A
    new token sees the tail, itself and, unless its owner is ``own_only`` [G], the new tokens before
    it. ``norm`` is gamma, beta [heads, f]. Padded tokens come last and may hold anything finite.
    Changes nothing.
    """
    (q, k, v), (W, b), (tail_k, tail_y) = qkv, state, tail
    gamma, beta = norm[0][:, None], norm[1][:, None]
    y = rate[..., None] * _inner_gradient(k @ W + b[:, :, None], v - k, gamma, beta)
    is_held = torch.arange(tail_k.shape[2], device=held.device) < held[:, None]
    old = (q @ tail_k.transpose(-1, -2) + 1).masked_fill(~is_held[:, None, None, :], 0.0)
    new = (q @ k.transpose(-1, -2) + 1).masked_fill(_unseen(own_only, k.shape[2]), 0.0)
    update = old @ tail_y.masked_fill(~is_held[:, None, :, None], 0.0) + new @ y
    z = q @ W + b[:, :, None] - tau[:, None, :, None] * update
    return q + _normed(z)[0] * gamma + beta, y


def next_state(
    W: Tensor, b: Tensor, tail_k: Tensor, tail_y: Tensor, tau: float
) -> tuple[Tensor, Tensor]:
    """W [G, heads, f, f] and b [G, heads, f] after complete tails [G, heads, C, f]; new tensors."""
    return W - tau * (tail_k.transpose(-1, -2) @ tail_y), b - tau * tail_y.sum(2)


def _unseen(own_only: Tensor, count: int) -> Tensor:
    """Bool [G, 1, c, c]: which new tokens a new token does not see."""
    full = torch.ones(count, count, dtype=torch.bool, device=own_only.device)
    earlier = full.tril(-1) & own_only[:, None, None]
    return (full.triu(1) | earlier)[:, None]


def _normed(z: Tensor) -> tuple[Tensor, Tensor]:
    std = (z.var(-1, keepdim=True, unbiased=False) + EPS).sqrt()
    return (z - z.mean(-1, keepdim=True)) / std, std


def _inner_gradient(z: Tensor, target: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Gradient of 1/2 || LN(z) - target ||^2 with respect to z."""
    x, std = _normed(z)
    dx = (x * gamma + beta - target) * gamma
    along = (dx * x).mean(-1, keepdim=True)
    return (dx - dx.mean(-1, keepdim=True) - x * along) / std
