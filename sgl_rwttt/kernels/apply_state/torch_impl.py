"""READ with two matrix products per run, or per batch of runs, on views of the pools."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_rwttt.kernels.apply_state.batches import Rows, Run, make_batches
from sgl_rwttt.kernels.apply_state.plan import ReadPlan

_WIDENED = 64  # page rows that are widened at a time, so that they stay in the cache


def apply_state(h: Tensor, out: Tensor, plan: ReadPlan, H: Tensor, V: Tensor, D: Tensor) -> None:
    """Add the state's part of the layer output to ``out``, in place.

    h [N, d_ff] and the pools H [pages * C, d_ff], V [pages * C, d] share one dtype;
    D [bases, d, d_ff] and out [N, d] are float32. All are contiguous. Only rows named in ``plan``
    are touched (padding rows of the batch are simply not named), and only page rows and bases
    named there count, so free memory may hold anything. Sums are float32 whatever the pools' dtype;
    with narrower pools, a group of one row has its scores and each run's sum rounded to it.
    """
    batches = plan.prepared(make_batches)
    for rows, slot in batches.bases:
        total = select(out, rows)
        total.addmm_(select(h, rows).to(D.dtype), D[slot].T)
        put_back(out, rows, total)
    for batch in batches.pages:
        total = select(out, batch.rows).view(batch.groups, -1, out.shape[1])
        queries = select(h, batch.rows).view(batch.groups, -1, h.shape[1])
        for run in batch.runs:
            _add_run(queries, total, run, H, V)
        put_back(out, batch.rows, total.flatten(0, 1))


def select(tensor: Tensor, rows: Rows) -> Tensor:
    """The rows, as a view where they are contiguous."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def put_back(tensor: Tensor, rows: Rows, values: Tensor) -> None:
    """Write ``values`` that ``select`` had to copy."""
    if not isinstance(rows, slice):
        tensor.index_copy_(0, rows, values)


def _add_run(h: Tensor, total: Tensor, run: Run, H: Tensor, V: Tensor) -> None:
    """total [G, m, d] += (h H^T) V for h [G, m, d_ff] and one run of each group."""
    if run.stride is not None and (h.dtype == total.dtype or run.rows <= _WIDENED):
        keys, values = _strided(H, run).to(total.dtype), _strided(V, run).to(total.dtype)
        total.baddbmm_(torch.bmm(h.to(total.dtype), keys.transpose(1, 2)), values)
        return
    for index, first in enumerate(run.firsts):
        rows = slice(first, first + run.rows)
        _add_rows(h[index], total[index], H[rows], V[rows])


def _add_rows(h: Tensor, total: Tensor, H: Tensor, V: Tensor) -> None:
    """The same for one group. Few CPUs multiply matrices of narrow numbers fast: widen them."""
    if h.dtype == total.dtype:
        total.addmm_(h @ H.T, V)
    elif h.shape[0] == 1:
        total[0] += V.T.mv(H.mv(h[0]))
    else:
        h = h.to(total.dtype)
        for first in range(0, H.shape[0], _WIDENED):
            rows = slice(first, first + _WIDENED)
            total.addmm_(h @ H[rows].to(h.dtype).T, V[rows].to(h.dtype))


def _strided(pool: Tensor, run: Run) -> Tensor:
    """View [G, rows, width] of a pool."""
    stride = pool.stride(0)
    assert run.stride is not None
    return pool.as_strided(
        (len(run.firsts), run.rows, pool.shape[1]),
        (run.stride * stride, stride, 1),
        pool.storage_offset() + run.firsts[0] * stride,
    )
