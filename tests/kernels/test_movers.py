"""Selective commit and checkpoints on the torch path."""

from __future__ import annotations

import pytest
import torch

from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.checkpoint import naive as naive_checkpoint
from sgl_rwttt.kernels.selective_commit import naive as naive_commit

commit = kernel("selective_commit")
write, read = kernel("checkpoint_write"), kernel("checkpoint_read")


@pytest.mark.parametrize("selected", [None, [True, False, True], [False] * 3], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_selective_commit(selected: list[bool] | None, dtype: torch.dtype) -> None:
    """Guards: a candidate published that was not selected, or another owner's."""
    torch.manual_seed(0)
    src, dst = torch.randn(5, 2, 7), torch.randn(6, 2, 7).to(dtype)
    a, b = torch.tensor([4, 1, 2]), torch.tensor([1, 5, 3])
    mask = None if selected is None else torch.tensor(selected)
    expected = dst.clone()
    naive_commit.selective_commit(src, expected, a, b, mask)
    commit(src, dst, a, b, mask)
    assert torch.equal(dst, expected)


def test_commit_refuses() -> None:
    """Guards: tables that Triton would read as other numbers than they are."""
    pool, slots = torch.zeros(3, 4, 4), torch.tensor([1, 2])
    refused = [
        (pool[:, :2], pool, slots, slots, None, "src slots are"),
        (pool.transpose(1, 2), pool, slots, slots, None, "not contiguous"),
        (pool, pool, slots.int(), slots, None, "src_slots is torch.int32"),
        (pool, pool, slots, slots[:1], None, "dst_slots is"),
        (pool, pool, slots, slots, torch.tensor([1, 0]), "selected is torch.int64"),
    ]
    for *arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            commit(*arguments)
    assert not pool.any()


@pytest.mark.parametrize("base", [None, 1])
@pytest.mark.parametrize("pages", [(), (5, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoint(pages: tuple[int, ...], base: int | None, dtype: torch.dtype) -> None:
    """Guards: pages in another order, layers mixed up, a slot filled that was not named."""
    torch.manual_seed(0)
    H, V = torch.randn(2, 28, 9).to(dtype), torch.randn(2, 28, 5).to(dtype)
    D = torch.randn(2, 3, 5, 9)
    expected = naive_checkpoint.checkpoint_write(H, V, D, pages, base, 4)
    checkpoint = write(H, V, D, pages, base, 4)
    assert checkpoint.buffer.is_contiguous() and checkpoint.buffer.dtype == torch.uint8
    pools = [torch.full_like(pool, torch.nan) for pool in (H, V, D)]
    others, other_base = tuple(page + 1 for page in pages), None if base is None else 2
    read(checkpoint, *pools, others, other_base, 4)
    again = naive_checkpoint.checkpoint_write(*pools, others, other_base, 4)
    for held, found, wanted in zip(checkpoint[1:], again, expected, strict=True):
        if wanted is None:
            assert held is None and found is None
        else:
            assert torch.equal(held.flatten(), wanted.flatten()) and torch.equal(found, wanted)
    filled = 2 * (len(pages) * 4 * (9 + 5) + (0 if base is None else 5 * 9))
    assert sum(int((~pool.isnan()).sum()) for pool in pools) == filled


def test_checkpoint_refuses() -> None:
    """Guards: a checkpoint read into another number of slots; pools that are not whole pages."""
    pools = torch.zeros(1, 8, 3), torch.zeros(1, 8, 2), torch.zeros(1, 2, 2, 3)
    checkpoint = write(*pools, (1,), None, 4)
    for pages, base in (((0, 1), None), ((1,), 1)):
        with pytest.raises(ValueError, match="the checkpoint has 1 pages and no base"):
            read(checkpoint, *pools, pages, base, 4)
    with pytest.raises(ValueError, match="not the same pages of 3"):
        write(*pools, (1,), None, 3)
