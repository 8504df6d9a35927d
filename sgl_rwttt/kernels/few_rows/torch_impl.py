"""The product as (W x^T)^T, with the weight as the tall left factor.

The BLAS library in torch then reads a weight for 2 to 4 rows nearly as fast as for one, and shares
the work of up to 64 rows better among threads; as x W^T, two rows take twice as long as one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, K] times weight [N, K] transposed: contiguous [rows, N]."""
    return torch.mm(weight, x.t()).t().contiguous()
