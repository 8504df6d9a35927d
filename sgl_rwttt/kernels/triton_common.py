"""What the Triton kernels share."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def dot(a, b, acc, WIDEN: tl.constexpr):  # type: ignore[no-untyped-def]
    """acc + a @ b in float32. Float32 tiles are multiplied as three TF32 products, which keeps
    about 22 bits of each factor; bfloat16 and float16 tiles directly, or widened if WIDEN."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


def widen(dtype: torch.dtype) -> bool:
    """WIDEN for factors of a pool's dtype: the interpreter has no bfloat16 arithmetic."""
    return INTERPRETED and dtype != torch.float32


def blocks(size: int, block: int) -> int:
    """How many blocks cover ``size``."""
    return -(-size // block)
