"""Prefill attention one token and one head at a time: the reference."""

from __future__ import annotations

import torch
from torch import Tensor


def extend_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """As ``torch_impl.extend_attention``; k, v [prefix + M, Hk, D] begin with the prefix."""
    out = torch.zeros_like(q)
    group, prefix = q.shape[1] // k.shape[1], k.shape[0] - q.shape[0]
    for token in range(q.shape[0]):
        end = prefix + token + 1
        for head in range(q.shape[1]):
            scores = scale * (k[:end, head // group] @ q[token, head])
            out[token, head] = scores.softmax(0) @ v[:end, head // group]
    return out
