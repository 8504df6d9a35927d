"""The rule as an eager loop: one owner, one token at a time, a dense weight per layer."""

from __future__ import annotations

import torch
from torch import Tensor


class InPlaceOracle:
    """Dense fast weights of one owner and one layer, float32. Shares no code with the package."""

    def __init__(self, conv: Tensor, proj: Tensor | None, lr: float, chunk: int, d_ff: int) -> None:
        self.conv, self.proj, self.lr, self.chunk = conv, proj, lr, chunk
        self.W = torch.zeros(conv.shape[0], d_ff)
        self.h_rows: list[Tensor] = []
        self.t_rows: list[Tensor] = []

    def step(self, h: Tensor, t: Tensor, write: bool) -> Tensor:
        """Answer one token from the present weight, then take its evidence."""
        y = self.W @ h
        if write:
            self.h_rows.append(h)
            self.t_rows.append(t)
            if len(self.h_rows) == self.chunk:
                self._update()
        return y

    def _update(self) -> None:
        zero = torch.zeros_like(self.t_rows[0])
        padded = [zero, zero, *self.t_rows, zero, zero]
        for i, h in enumerate(self.h_rows):
            t_hat = sum(self.conv[:, 0, k] * padded[i + k] for k in range(5))
            v = t_hat if self.proj is None else t_hat @ self.proj
            self.W = self.W + self.lr * torch.outer(v, h)
        self.h_rows, self.t_rows = [], []
