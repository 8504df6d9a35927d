"""READ one batch row and one page row at a time: the reference."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sgl_rwttt.kernels.apply_state.plan import ReadPart


def apply_state(
    h: Tensor, out: Tensor, parts: Sequence[ReadPart], H: Tensor, V: Tensor, D: Tensor, chunk: int
) -> None:
    """As ``torch_impl.apply_state``, from the unmerged parts; any floating dtype."""
    for part in parts:
        for row in range(part.start, part.start + part.rows):
            if part.base is not None:
                out[row] += D[part.base] @ h[row].to(D.dtype)
            for page in part.pages:
                for i in range(page * chunk, (page + 1) * chunk):
                    out[row] += (H[i].to(out.dtype) @ h[row].to(out.dtype)) * V[i].to(out.dtype)
