"""TTT-Linear in the decode form, one token of one owner at a time: the reference.

The tail is the pair of gradient accumulators (G_W, G_b), as in the paper. Source: Sun et al. 2025.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6


def inner_gradient(z: Tensor, target: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """Gradient of 1/2 || LN(z) - target ||^2 with respect to z; all [heads, f]."""
    f = z.shape[-1]
    std = (z.var(-1, keepdim=True, unbiased=False) + EPS).sqrt()
    x = (z - z.mean(-1, keepdim=True)) / std
    dx = (gamma * x + beta - target) * gamma
    return (dx - dx.sum(-1, keepdim=True) / f - x * (dx * x).sum(-1, keepdim=True) / f) / std


def decode_token(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    tau: float,
    state: tuple[Tensor, Tensor],
    tail: tuple[Tensor, Tensor],
    gamma: Tensor,
    beta: Tensor,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Answer one token; returns (out [heads, f], the tail with its gradient).

    q, k, v [heads, f]; rate [heads] is lambda; tau belongs to the token's offset in the mini-batch.
    ``state`` is W_0 [heads, f, f], b_0 [heads, f]; ``tail`` is G_W, G_b of the same shapes, zeros
    at the mini-batch's start. Changes nothing.
    """
    (W, b), (G_W, G_b) = state, tail
    z = (k[:, None] @ W)[:, 0] + b
    step = rate[:, None] * inner_gradient(z, v - k, gamma, beta)
    G_W = G_W + k[:, :, None] * step[:, None, :]
    G_b = G_b + step
    y = (q[:, None] @ (W - tau * G_W))[:, 0] + b - tau * G_b
    normed = F.layer_norm(y, y.shape[-1:], eps=EPS) * gamma + beta
    return q + normed, (G_W, G_b)


def next_state(
    state: tuple[Tensor, Tensor], tail: tuple[Tensor, Tensor], tau: float
) -> tuple[Tensor, Tensor]:
    """W and b of the next mini-batch, from a complete tail and the last token's tau."""
    return state[0] - tau * tail[0], state[1] - tau * tail[1]
