"""READ on the GPU: scores of all groups in one launch, their sums over page rows in another."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.kernels.apply_state.plan import ReadPlan
from sgl_rwttt.kernels.apply_state.tables import FEW, Dense, Launch, make_tables
from sgl_rwttt.kernels.apply_state.triton_kernels import add_bases, mix, scores
from sgl_rwttt.kernels.triton_common import blocks, widen

_SPLIT = 2432  # about how much of d_ff one program sums up when there are few rows


class _Shape(NamedTuple):
    """Tile and pipeline of one kernel; ``block`` is along the dimension that is not the rows."""

    block: int
    warps: int
    stages: int


# By (few rows, bytes per number of the pools). Fixed, so that a replay has the same last bits.
_SCORES = {
    (True, 4): _Shape(128, 4, 4),
    (True, 2): _Shape(256, 4, 4),
    (False, 4): _Shape(32, 4, 4),
    (False, 2): _Shape(64, 4, 4),
}
_MIX = {
    (True, 4): _Shape(64, 4, 3),
    (True, 2): _Shape(64, 4, 3),
    (False, 4): _Shape(128, 8, 3),
    (False, 2): _Shape(128, 8, 3),
}
_MIX_PAGE_ROWS = 32
_BASES = _Shape(128, 4, 4)
_BASE_COLUMNS = 32


def apply_state(h: Tensor, out: Tensor, plan: ReadPlan, H: Tensor, V: Tensor, D: Tensor) -> None:
    """As ``torch_impl.apply_state``. No wait for the device; free memory may hold anything.

    Each row's sum is over its base, then its pages oldest first; products of float32 are three
    TF32 products (relative error about 1e-6), and scores of 16-bit pools are rounded to 16 bits.
    """
    tables = plan.prepared(make_tables)
    if tables.dense is not None:
        _add_bases(h, out, tables.dense, D)
    keys = H.view(-1, plan.chunk, H.shape[1])
    values = V.view(-1, plan.chunk, V.shape[1])
    for launch in tables.launches:
        add_pages(h, out, launch, keys, values, 1.0)


def add_pages(h: Tensor, out: Tensor, launch: Launch, H: Tensor, V: Tensor, scale: float) -> None:
    """out += scale * (h H^T) V for one launch; H [P, C, d_in] with adjacent d_in, V [P, C, d] of
    any strides."""
    depth, width, chunk = h.shape[1], out.shape[1], H.shape[1]
    few, size = launch.tiles is FEW, H.element_size()
    shape = _SCORES[few, size]
    splits = max(1, round(depth / _SPLIT)) if few else 1
    part = blocks(blocks(depth, splits), shape.block) * shape.block
    buffer = torch.empty(splits * launch.scores, dtype=torch.float32, device=h.device)
    scores[(launch.score_tiles.shape[0] // 3, splits)](
        h,
        H,
        buffer,
        launch.groups,
        launch.score_tiles,
        launch.rows,
        launch.pages,
        launch.scores,
        depth,
        part,
        chunk,
        h.stride(0),
        H.stride(0),
        H.stride(1),
        EVEN=depth % shape.block == 0,
        BLOCK_M=launch.tiles.batch,
        BLOCK_R=launch.tiles.pages,
        BLOCK_K=shape.block,
        WIDEN=widen(h.dtype),
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    shape = _MIX[few, size]
    mix[(launch.row_tiles.shape[0] // 2, blocks(width, shape.block))](
        buffer,
        V,
        out,
        launch.groups,
        launch.row_tiles,
        launch.rows,
        launch.pages,
        launch.scores,
        scale,
        width,
        chunk,
        V.stride(0),
        V.stride(1),
        V.stride(2),
        out.stride(0),
        SPLITS=splits,
        BLOCK_M=launch.tiles.batch,
        BLOCK_N=shape.block,
        BLOCK_R=_MIX_PAGE_ROWS,
        WIDEN=widen(V.dtype) or V.dtype == torch.float16,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def _add_bases(h: Tensor, out: Tensor, dense: Dense, D: Tensor) -> None:
    depth, width = h.shape[1], out.shape[1]
    add_bases[(dense.tiles.shape[0] // 3, blocks(width, _BASE_COLUMNS))](
        h,
        D,
        out,
        dense.tiles,
        dense.rows,
        depth,
        width,
        h.stride(0),
        D.stride(0),
        out.stride(0),
        BLOCK_M=FEW.batch,
        BLOCK_N=_BASE_COLUMNS,
        BLOCK_K=_BASES.block,
        num_warps=_BASES.warps,
        num_stages=_BASES.stages,
    )
