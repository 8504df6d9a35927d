"""What decode and prefill attention share: softmax attention with its log-sum-exp, and gathers."""

from __future__ import annotations

import torch
from torch import Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention on the CPU over q [n, Hq, M, D] and k, v [n, Hk, T, D]; Hk divides Hq.

    Any strides with a contiguous last dimension. ``mask`` [n, 1, 1, T] is added to the scores, 0 or
    -inf; ``causal`` needs M == T. Returns the output [n, Hq, M, D] in q's dtype and the log-sum-exp
    of the scores [n, Hq, M] in float32, from which partial results are merged.
    """
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return out, lse


def merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> Tensor:
    """Attention over two disjoint sets of keys from the attention over each, in a's dtype.

    Outputs [..., D], their log-sum-exps [...] in float32. Source: the online softmax of
    FlashAttention (Dao et al. 2022).
    """
    share = torch.sigmoid(lse_b - lse_a).unsqueeze(-1)
    return torch.lerp(a.float(), b.float(), share).to(a.dtype)


def as_run(slots: Tensor) -> slice | Tensor:
    """``slots`` as a slice where they ascend by one, so that reading them copies nothing."""
    first, count = int(slots[0]), slots.shape[0]
    if int(slots[-1]) - first != count - 1 or not bool((slots.diff() == 1).all()):
        return slots
    return slice(first, first + count)


class Scratch:
    """Reused memory for gathered K and V.

    A gather into fresh memory spends more on page faults than on the copy. What ``read`` returns
    holds until the next ``read`` with the same ``which``.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, int], Tensor] = {}

    def read(self, which: int, pool: Tensor, slots: slice | Tensor) -> Tensor:
        """Rows ``slots`` of ``pool`` [slots, Hk, D], contiguous: a view of it for a slice."""
        if isinstance(slots, slice):
            return pool[slots]
        rows = pool.view(pool.shape[0], -1)
        count, width = slots.shape[0], rows.shape[1]
        key = (which, pool.dtype, width)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[0] < count:
            buffer = pool.new_empty(1 << (count - 1).bit_length(), width)
            self._buffers[key] = buffer
        torch.index_select(rows, 0, slots, out=buffer[:count])
        return buffer[:count].view(count, *pool.shape[1:])
