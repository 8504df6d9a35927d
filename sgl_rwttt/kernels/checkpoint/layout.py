"""How a checkpoint lies in memory: D, H, V, each contiguous and aligned, in one buffer of bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.kernels.host import device_table

_ALIGNMENT = 256  # bytes


class Checkpoint(NamedTuple):
    """One buffer and the views of it; n pages of C rows."""

    buffer: Tensor  # uint8, contiguous
    H: Tensor  # [L, n, C * d_ff], the pools' dtype
    V: Tensor  # [L, n, C * d]
    D: Tensor | None  # [L, 1, d * d_ff] float32


class Pools(NamedTuple):
    """The pools, seen as slots of one width each."""

    H: Tensor  # [L, P, C * d_ff]
    V: Tensor  # [L, P, C * d]
    D: Tensor  # [L, B, d * d_ff]


def by_slot(H: Tensor, V: Tensor, D: Tensor, chunk: int) -> Pools:
    """Views of H [L, P * C, d_ff], V [L, P * C, d] and D [L, B, d, d_ff], all contiguous.

    Raises ValueError when the pools' rows are not whole pages.
    """
    depth, rows = H.shape[0], H.shape[1]
    if rows % chunk or V.shape[:2] != H.shape[:2]:
        raise ValueError(f"H has {rows} and V {V.shape[1]} rows, not the same pages of {chunk}")
    pages = rows // chunk
    return Pools(H.view(depth, pages, -1), V.view(depth, pages, -1), D.flatten(2))


def empty(pools: Pools, pages: int, base: bool) -> Checkpoint:
    """An uninitialised checkpoint of ``pages`` pages and, if asked for, a base."""
    depth = pools.H.shape[0]
    shapes = [(pools.D, 1 if base else 0), (pools.H, pages), (pools.V, pages)]
    spans, end = [], 0
    for pool, slots in shapes:
        first = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = first + depth * slots * pool.shape[2] * pool.element_size()
        spans.append((first, end))
    buffer = torch.empty(end, dtype=torch.uint8, device=pools.H.device)
    D, H, V = (
        buffer[first:end].view(pool.dtype).view(depth, slots, pool.shape[2])
        for (first, end), (pool, slots) in zip(spans, shapes, strict=True)
    )
    return Checkpoint(buffer, H, V, D if base else None)


def slots_table(pages: Sequence[int], base: int | None, device: torch.device) -> Tensor:
    """Pages, then the base if any: one copy to the device."""
    return device_table([*pages, *([] if base is None else [base])], device)


def pairs(
    pools: Pools, checkpoint: Checkpoint, slots: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(pool, its part of the checkpoint, the slots of it) for H, V and, if there is one, the base.

    ``slots`` is the table of ``slots_table``.
    """
    pages = checkpoint.H.shape[1]
    yield pools.H, checkpoint.H, slots[:pages]
    yield pools.V, checkpoint.V, slots[:pages]
    if checkpoint.D is not None:
        yield pools.D, checkpoint.D, slots[pages:]


def check_fits(checkpoint: Checkpoint, pages: Sequence[int], base: int | None) -> None:
    """Raises ValueError when a checkpoint has other contents than there are slots to fill."""
    held = checkpoint.H.shape[1], checkpoint.D is not None
    if held != (len(pages), base is not None):
        raise ValueError(
            f"the checkpoint has {held[0]} pages and {'a' if held[1] else 'no'} base; "
            f"{len(pages)} pages and {'a' if base is not None else 'no'} base are to be filled"
        )
