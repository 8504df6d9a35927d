"""Decode attention one row and one head at a time: the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def decode_attention(
    q: Tensor, K: Tensor, V: Tensor, slots: Tensor, lengths: Sequence[int], scale: float
) -> Tensor:
    """As ``torch_impl.decode_attention``: row r reads ``slots[r, :lengths[r]]``; any dtype."""
    out = torch.zeros_like(q)
    group = q.shape[1] // K.shape[1]
    for row, length in enumerate(lengths):
        read = slots[row, :length]
        for head in range(q.shape[1] if length else 0):
            scores = scale * (K[read, head // group] @ q[row, head])
            out[row, head] = scores.softmax(0) @ V[read, head // group]
    return out
