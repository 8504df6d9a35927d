"""What every implementation of the selective commit refuses."""

from __future__ import annotations

import torch
from torch import Tensor


def check_commit(
    src: Tensor, dst: Tensor, src_slots: Tensor, dst_slots: Tensor, selected: Tensor | None
) -> None:
    """Raises ValueError that names the argument; looks at no values."""
    if src.shape[1:] != dst.shape[1:]:
        raise ValueError(f"src slots are {tuple(src.shape[1:])}, dst slots {tuple(dst.shape[1:])}")
    for name, pool in (("src", src), ("dst", dst)):
        if pool.shape[0] and not pool[0].is_contiguous():
            raise ValueError(f"a slot of {name} is not contiguous: strides {pool.stride()}")
    count = src_slots.shape
    for name, table, dtype in (
        ("src_slots", src_slots, torch.int64),
        ("dst_slots", dst_slots, torch.int64),
        ("selected", selected, torch.bool),
    ):
        if table is not None and (table.dtype != dtype or table.shape != count or table.dim() != 1):
            raise ValueError(
                f"{name} is {table.dtype} {tuple(table.shape)}, not {dtype} {tuple(count)}"
            )
