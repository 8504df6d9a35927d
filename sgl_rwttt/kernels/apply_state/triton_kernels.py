"""The kernels of READ. Offsets into pools and scores are 64 bits wide."""

from __future__ import annotations

import triton
import triton.language as tl

from sgl_rwttt.kernels.triton_common import dot

# Views of one table: compiling a kernel for each alignment would stall a server for seconds.
_TABLES = ["groups", "tiles", "rows", "pages"]


@triton.jit(do_not_specialize=["total"], do_not_specialize_on_alignment=_TABLES)
def scores(  # type: ignore[no-untyped-def]
    h,
    H,
    out,
    groups,
    tiles,
    rows,
    pages,
    total,
    K,
    part,
    chunk,
    h_row,
    H_page,
    H_row,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """h[rows] H[pages]^T of one tile of one group, over the ``part`` of K that is program 1's.

    Rows past a tile's end load row 0 of h or H instead; their products are not stored.
    """
    tile = tiles + 3 * tl.program_id(0)
    group = groups + 5 * tl.load(tile)
    m = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
    r = tl.load(tile + 2) + tl.arange(0, BLOCK_R)
    m_in = m < tl.load(group + 1)
    n_pages = tl.load(group + 3)
    r_in = r < n_pages
    row = tl.load(rows + tl.load(group) + m, mask=m_in, other=0)
    page = tl.load(pages + tl.load(group + 2) + r, mask=r_in, other=0)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, K)
    k = begin + tl.arange(0, BLOCK_K)
    a_at = h + (row * h_row)[:, None] + k[None, :]
    b_at = H + (page // chunk * H_page + page % chunk * H_row)[:, None] + k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        if EVEN:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            k_in = (start + tl.arange(0, BLOCK_K) < end)[None, :]
            a = tl.load(a_at, mask=k_in, other=0.0)
            b = tl.load(b_at, mask=k_in, other=0.0)
        acc = dot(a, tl.trans(b), acc, WIDEN)
        a_at += BLOCK_K
        b_at += BLOCK_K
    at = out + tl.program_id(1) * total + tl.load(group + 4) + m[:, None] * n_pages + r[None, :]
    tl.store(at, acc, mask=m_in[:, None] & r_in[None, :])


@triton.jit(do_not_specialize=["total"], do_not_specialize_on_alignment=_TABLES)
def mix(  # type: ignore[no-untyped-def]
    scores,
    V,
    out,
    groups,
    tiles,
    rows,
    pages,
    total,
    scale,
    N,
    chunk,
    V_page,
    V_row,
    V_col,
    out_row,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """out[rows] += scale * scores V[pages] of one tile of one group, scores summed over splits."""
    tile = tiles + 2 * tl.program_id(0)
    group = groups + 5 * tl.load(tile)
    m = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_in, n_in = m < tl.load(group + 1), n < N
    n_pages = tl.load(group + 3)
    page_at = pages + tl.load(group + 2)
    score_at = scores + tl.load(group + 4) + m[:, None] * n_pages
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, n_pages, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        r_in = r < n_pages
        page = tl.load(page_at + r, mask=r_in, other=0)
        v_at = V + (page // chunk * V_page + page % chunk * V_row)[:, None] + (n * V_col)[None, :]
        v = tl.load(v_at, mask=r_in[:, None] & n_in[None, :], other=0.0)
        s_in = m_in[:, None] & r_in[None, :]
        s = tl.load(score_at + r[None, :], mask=s_in, other=0.0)
        for split in tl.static_range(1, SPLITS):
            s += tl.load(score_at + split * total + r[None, :], mask=s_in, other=0.0)
        if WIDEN:
            acc = dot(s, v.to(tl.float32), acc, False)
        else:
            acc = dot(s.to(v.dtype), v, acc, False)
    row = tl.load(rows + tl.load(group) + m, mask=m_in, other=0)
    at = out + (row * out_row)[:, None] + n[None, :]
    inside = m_in[:, None] & n_in[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + scale * acc, mask=inside)


@triton.jit(do_not_specialize_on_alignment=_TABLES)
def add_bases(  # type: ignore[no-untyped-def]
    h,
    D,
    out,
    tiles,
    rows,
    K,
    N,
    h_row,
    D_base,
    out_row,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[rows] += h[rows] D[base]^T of one tile of rows and BLOCK_N columns; D is float32."""
    tile = tiles + 3 * tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_in, n_in = m < tl.load(tile + 1), n < N
    row = tl.load(rows + tl.load(tile) + m, mask=m_in, other=0)
    k = tl.arange(0, BLOCK_K)
    a_at = h + (row * h_row)[:, None] + k[None, :]
    b_at = D + tl.load(tile + 2) * D_base + tl.where(n_in, n, 0).to(tl.int64)[:, None] * K
    b_at += k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k_in = (start + k < K)[None, :]
        a = tl.load(a_at, mask=k_in, other=0.0).to(tl.float32)
        b = tl.load(b_at, mask=k_in, other=0.0)
        acc = dot(a, tl.trans(b), acc, False)
        a_at += BLOCK_K
        b_at += BLOCK_K
    at = out + (row * out_row)[:, None] + n[None, :]
    inside = m_in[:, None] & n_in[None, :]
    tl.store(at, tl.load(at, mask=inside, other=0.0) + acc, mask=inside)
