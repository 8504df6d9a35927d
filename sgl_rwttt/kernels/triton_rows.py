"""The one Triton kernel that moves memory: rows of a pool to rows of another, by index."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_rwttt.kernels.triton_common import blocks

_BLOCK = 2048  # elements per program
_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["src_rows", "dst_rows", "selected"])
def _move_rows(  # type: ignore[no-untyped-def]
    src,
    dst,
    src_rows,
    dst_rows,
    selected,
    width,
    row_blocks,
    src_layer,
    src_row,
    dst_layer,
    dst_row,
    SRC_INDEXED: tl.constexpr,
    DST_INDEXED: tl.constexpr,
    SELECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) // row_blocks
    at = (tl.program_id(0) % row_blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = index.to(tl.int64)
    b = index.to(tl.int64)
    if SRC_INDEXED:
        a = tl.load(src_rows + index)
    if DST_INDEXED:
        b = tl.load(dst_rows + index)
    layer = tl.program_id(1).to(tl.int64)
    inside = at < width
    if SELECTED:
        inside &= tl.load(selected + index) != 0
    values = tl.load(src + layer * src_layer + a * src_row + at, mask=inside)
    tl.store(dst + layer * dst_layer + b * dst_row + at, values, mask=inside)


def move_rows(
    src: Tensor,
    dst: Tensor,
    src_rows: Tensor | None,
    dst_rows: Tensor | None,
    count: int,
    selected: Tensor | None = None,
) -> None:
    """dst[l, dst_rows[i]] = src[l, src_rows[i]] for i < count, and selected[i] if given, all l.

    src [L, A, width] and dst [L, B, width] with adjacent width; cast to dst's dtype. Rows are
    int64, None for 0 to count - 1; selected is bool. No destination row may occur twice.
    """
    width = src.shape[2]
    if count == 0 or width == 0:
        return
    row_blocks = blocks(width, _BLOCK)
    _move_rows[(count * row_blocks, src.shape[0])](
        src,
        dst,
        src if src_rows is None else src_rows,
        dst if dst_rows is None else dst_rows,
        src if selected is None else selected.view(torch.uint8),
        width,
        row_blocks,
        src.stride(0),
        src.stride(1),
        dst.stride(0),
        dst.stride(1),
        SRC_INDEXED=src_rows is not None,
        DST_INDEXED=dst_rows is not None,
        SELECTED=selected is not None,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )
