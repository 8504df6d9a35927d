"""Prefill attention: the new tokens causally, the prefix without a mask, merged."""

from __future__ import annotations

from torch import Tensor

from sgl_rwttt.kernels.attention import Scratch, attend, merge


def extend_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    K: Tensor,
    V: Tensor,
    prefix: slice | Tensor | None,
    scale: float,
    scratch: Scratch,
) -> Tensor:
    """Return [M, Hq, D]: token i of q [M, Hq, D] attends to the prefix and to new tokens 0..i.

    k, v [M, Hk, D] belong to the new tokens; the prefix is at slots ``prefix`` of the pools K, V
    [slots, Hk, D], None when there is none. One dtype; Hk divides Hq. M * (prefix + M / 2) scores
    are computed and no others. Modifies only ``scratch``.
    """
    query = _heads(q)
    out, lse = attend(query, _heads(k), _heads(v), scale, causal=True)
    if prefix is not None:
        keys = _heads(scratch.read(0, K, prefix))
        values = _heads(scratch.read(1, V, prefix))
        out = merge(out, lse, *attend(query, keys, values, scale))
    return out[0].transpose(0, 1)


def _heads(tokens: Tensor) -> Tensor:
    return tokens.transpose(0, 1).unsqueeze(0)
