"""BoundaryUpdate tap by tap: the reference."""

from __future__ import annotations

import torch
from torch import Tensor


def boundary_update(T: Tensor, conv: Tensor, proj: Tensor | None, lr: float) -> Tensor:
    """As ``torch_impl.boundary_update``."""
    V = torch.zeros_like(T)
    for g in range(T.shape[0]):
        for i in range(T.shape[1]):
            for k in range(5):
                if 0 <= i + k - 2 < T.shape[1]:
                    V[g, i] += conv[:, k] * T[g, i + k - 2]
        if proj is not None:
            V[g] = V[g] @ proj
    return lr * V
