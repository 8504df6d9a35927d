"""BoundaryUpdate on the GPU: the taps in one launch, the projection in another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_rwttt.kernels.triton_common import blocks, dot, widen

_TAP_ROWS, _TAP_COLUMNS = 16, 128
_ROWS, _COLUMNS, _DEPTH = 64, 128, 32  # small enough to fill a card with eight chunks
_GROUP = 8  # row blocks that go through the columns together, for the sake of the L2 cache


@triton.jit
def _taps(  # type: ignore[no-untyped-def]
    T,
    conv,
    out,
    chunk,
    d,
    row_blocks,
    scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """out[g, i] = scale * sum over k of conv[:, k] * T[g, i + k - 2], zero outside the chunk."""
    g = tl.program_id(0) // row_blocks
    i = tl.program_id(0) % row_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = n < d
    at = g.to(tl.int64) * chunk * d + i[:, None] * d + n[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in tl.static_range(5):
        inside = (i + k >= 2) & (i + k < chunk + 2)
        row = tl.load(T + at + (k - 2) * d, mask=inside[:, None] & n_in[None, :], other=0.0)
        tap = tl.load(conv + n * 5 + k, mask=n_in, other=0.0).to(tl.float32)
        acc += row.to(tl.float32) * tap[None, :]
    tl.store(out + at, scale * acc, mask=(i < chunk)[:, None] & n_in[None, :])


@triton.jit(do_not_specialize=["M"])
def _project(  # type: ignore[no-untyped-def]
    A,
    B,
    out,
    M,
    d,
    scale,
    B_row,
    B_col,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out = scale * A B for A [M, d], B [d, d] of any strides."""
    pid_m, pid_n = tl.swizzle2d(
        tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1), GROUP
    )
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_in, n_in = m < M, n < d
    k = tl.arange(0, BLOCK_K)
    a_at = A + tl.where(m_in, m, 0).to(tl.int64)[:, None] * d + k[None, :]
    b_at = B + k[:, None] * B_row + n[None, :] * B_col
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, d, BLOCK_K):
        k_in = start + k < d
        a = tl.load(a_at, mask=k_in[None, :], other=0.0)
        b = tl.load(b_at, mask=k_in[:, None] & n_in[None, :], other=0.0)
        acc = dot(a, b, acc, WIDEN)
        a_at += BLOCK_K
        b_at += BLOCK_K * B_row
    at = out + m.to(tl.int64)[:, None] * d + n[None, :]
    tl.store(at, scale * acc, mask=m_in[:, None] & n_in[None, :])


def boundary_update(T: Tensor, conv: Tensor, proj: Tensor | None, lr: float) -> Tensor:
    """As ``torch_impl.boundary_update``. Sums are float32; products of float32 are three TF32
    products. In 16-bit dtypes the convolution is rounded before the projection. A row's result
    depends on its chunk alone: tiles and the order of sums do not vary with G."""
    groups, chunk, d = T.shape
    T, mixed = T.contiguous(), torch.empty(T.shape, dtype=T.dtype, device=T.device)
    if T.numel() == 0:
        return mixed
    row_blocks = blocks(chunk, _TAP_ROWS)
    _taps[(groups * row_blocks, blocks(d, _TAP_COLUMNS))](
        T,
        conv.contiguous(),
        mixed,
        chunk,
        d,
        row_blocks,
        lr if proj is None else 1.0,
        BLOCK_M=_TAP_ROWS,
        BLOCK_N=_TAP_COLUMNS,
        num_warps=4,
    )
    if proj is None:
        return mixed
    V = torch.empty_like(mixed)
    _project[(blocks(groups * chunk, _ROWS), blocks(d, _COLUMNS))](
        mixed,
        proj,
        V,
        groups * chunk,
        d,
        lr,
        proj.stride(0),
        proj.stride(1),
        BLOCK_M=_ROWS,
        BLOCK_N=_COLUMNS,
        BLOCK_K=_DEPTH,
        GROUP=_GROUP,
        WIDEN=widen(T.dtype),
        num_warps=4,
        num_stages=4,
    )
    return V
