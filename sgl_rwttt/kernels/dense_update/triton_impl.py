"""Fold on the GPU: all runs of one base in one launch, the base read and written once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_rwttt.kernels.dense_update.torch_impl import check_slots
from sgl_rwttt.kernels.host import device_table
from sgl_rwttt.kernels.triton_common import blocks, dot, widen

_ROWS, _COLUMNS = 128, 128
_DEPTH = {4: 32, 2: 64}  # page rows per step, by bytes per number of the pools
_GROUP = 8  # row blocks that go through the columns together, for the sake of the L2 cache


@triton.jit(do_not_specialize=["n_pages"])
def _fold(  # type: ignore[no-untyped-def]
    src,
    dst,
    H,
    V,
    pages,
    n_pages,
    M,
    N,
    H_row,
    V_row,
    FROM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """dst = (src if FROM else 0) + V[pages]^T H[pages], [M, N]."""
    pid_m, pid_n = tl.swizzle2d(
        tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1), GROUP
    )
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_in, n_in = m < M, n < N
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, n_pages, BLOCK_K):
        r = first + tl.arange(0, BLOCK_K)
        r_in = r < n_pages
        row = tl.load(pages + r, mask=r_in, other=0)[:, None]
        v = tl.load(V + row * V_row + m[None, :], mask=r_in[:, None] & m_in[None, :], other=0.0)
        h = tl.load(H + row * H_row + n[None, :], mask=r_in[:, None] & n_in[None, :], other=0.0)
        acc = dot(tl.trans(v), h, acc, WIDEN)
    inside = m_in[:, None] & n_in[None, :]
    at = m.to(tl.int64)[:, None] * N + n[None, :]
    if FROM:
        acc += tl.load(src + at, mask=inside, other=0.0)
    tl.store(dst + at, acc, mask=inside)


def dense_update(
    D: Tensor, src: int | None, dst: int, runs: Sequence[tuple[int, int]], H: Tensor, V: Tensor
) -> None:
    """As ``torch_impl.dense_update``. The runs are summed in float32, oldest first, and then added
    to the base; products of float32 are three TF32 products."""
    check_slots(src, dst)
    pages = _pool_rows(tuple(runs), D.device)
    target = D[dst]
    rows, columns = target.shape
    _fold[(blocks(rows, _ROWS), blocks(columns, _COLUMNS))](
        target if src is None else D[src],
        target,
        H,
        V,
        pages,
        pages.shape[0],
        rows,
        columns,
        H.stride(0),
        V.stride(0),
        FROM=src is not None,
        BLOCK_M=_ROWS,
        BLOCK_N=_COLUMNS,
        BLOCK_K=_DEPTH[H.element_size()],
        GROUP=_GROUP,
        WIDEN=widen(H.dtype),
        num_warps=8,
        num_stages=3,
    )


@lru_cache(maxsize=16)
def _pool_rows(runs: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """The rows of ``runs``; every layer of a fold asks for the same."""
    return device_table([row for first, end in runs for row in range(first, end)], device)
