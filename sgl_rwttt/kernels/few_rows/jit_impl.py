"""The product compiled: the weight is read once, in the order of memory, for all rows of x.

The memory limits it with up to 8 rows; a BLAS library spends its time on packing a weight that is
used once. Each thread has an even share of the weight's rows.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from sgl_rwttt.kernels.jit import Kernel, floats, inlined, numbers, thread

_BLOCK = 32  # rows of the weight that stay in the cache while all rows of x meet them
_PADDED = 4  # rows of x, but for a single one, are filled up to a multiple of this


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, K] times weight [N, K] transposed: contiguous [rows, N].

    Both float32; the weight is contiguous. Sums are float32, in an order of their own.
    """
    rows, (outputs, width) = x.shape[0], weight.shape
    filled = rows if rows <= 1 else -(-rows // _PADDED) * _PADDED
    x = nn.functional.pad(x, (0, 0, 0, filled - rows)) if filled > rows else x.contiguous()
    y = torch.empty(filled, outputs)
    kernel(torch.get_num_threads(), weight, x, y, outputs, width, filled)
    return y[:rows]


def _product(pointer):
    weight, x, y, outputs, width, rows = numbers(pointer, 6)
    number, threads = thread()
    w, x, y = floats(weight, (outputs, width)), floats(x, (rows, width)), floats(y, (rows, outputs))
    last = outputs * (number + 1) // threads
    for start in range(outputs * number // threads, last, _BLOCK):
        stop = min(start + _BLOCK, last)
        r = 0
        while r < rows:
            if rows - r >= 8:
                for n in range(start, stop):
                    _eight(w, n, x, y, r)
                r += 8
            elif rows - r >= 4:
                for n in range(start, stop):
                    _four(w, n, x, y, r)
                r += 4
            else:
                for n in range(start, stop):
                    _one(w, n, x, y, r)
                r += 1


@inlined
def _one(w, n, x, y, r):
    """y[r, n] = w[n] . x[r]."""
    a = np.float32(0)
    for k in range(w.shape[1]):
        a += w[n, k] * x[r, k]
    y[r, n] = a


@inlined
def _four(w, n, x, y, r):
    """The same for x[r : r + 4]."""
    a = b = c = d = np.float32(0)
    for k in range(w.shape[1]):
        f = w[n, k]
        a += f * x[r, k]
        b += f * x[r + 1, k]
        c += f * x[r + 2, k]
        d += f * x[r + 3, k]
    y[r, n], y[r + 1, n], y[r + 2, n], y[r + 3, n] = a, b, c, d


@inlined
def _eight(w, n, x, y, r):
    """The same for x[r : r + 8]: as many sums as registers hold beside the factors."""
    a = b = c = d = e = f = g = h = np.float32(0)
    for k in range(w.shape[1]):
        v = w[n, k]
        a += v * x[r, k]
        b += v * x[r + 1, k]
        c += v * x[r + 2, k]
        d += v * x[r + 3, k]
        e += v * x[r + 4, k]
        f += v * x[r + 5, k]
        g += v * x[r + 6, k]
        h += v * x[r + 7, k]
    y[r, n], y[r + 1, n], y[r + 2, n], y[r + 3, n] = a, b, c, d
    y[r + 4, n], y[r + 5, n], y[r + 6, n], y[r + 7, n] = e, f, g, h


kernel = Kernel(_product)
