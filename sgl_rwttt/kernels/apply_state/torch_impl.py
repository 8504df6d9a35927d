"""READ with two matrix products per run, on views of the pools."""

from __future__ import annotations

from torch import Tensor

from sgl_rwttt.kernels.apply_state.plan import ReadGroup, ReadPlan


def apply_state(h: Tensor, out: Tensor, plan: ReadPlan, H: Tensor, V: Tensor, D: Tensor) -> None:
    """Add the state's part of the layer output to ``out``, in place.

    h [N, d_ff] and the pools H [pages * C, d_ff], V [pages * C, d] share one dtype;
    D [bases, d, d_ff] and out [N, d] are float32. Only rows named in ``plan`` are touched, and
    only page rows and bases named there are read, so free memory may hold anything.
    """
    for group in plan:
        if isinstance(group.rows, slice):
            _add(h[group.rows], out[group.rows], group, H, V, D)
        else:
            total = out.index_select(0, group.rows)
            _add(h.index_select(0, group.rows), total, group, H, V, D)
            out.index_copy_(0, group.rows, total)


def _add(h: Tensor, total: Tensor, group: ReadGroup, H: Tensor, V: Tensor, D: Tensor) -> None:
    for slot in group.bases:
        total.addmm_(h.to(D.dtype), D[slot].T)
    for first, end in group.runs:
        scores = h @ H[first:end].T
        if scores.dtype == total.dtype:
            total.addmm_(scores, V[first:end])
        else:
            total += scores @ V[first:end]
