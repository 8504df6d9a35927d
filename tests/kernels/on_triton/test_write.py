"""BoundaryUpdate, fold and the movers against float64, one row at a time."""

from __future__ import annotations

import pytest
import torch

from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.boundary_update import naive as naive_boundary
from sgl_rwttt.kernels.checkpoint import naive as naive_checkpoint
from sgl_rwttt.kernels.dense_update import naive as naive_fold
from sgl_rwttt.kernels.selective_commit import naive as naive_commit
from sgl_rwttt.kernels.tail_append import naive as naive_append
from sgl_rwttt.kernels.tail_append.plan import plan_append
from tests.assert_close import assert_close

# RMSE ratios: float32 is three TF32 products, whose sums tensor cores cut off; 16-bit results are
# rounded twice, and Triton's interpreter cuts bfloat16 off instead of rounding it.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def exact(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 values that ``dtype`` holds without rounding."""
    return values.to(dtype).float()


SHAPES = [(3, 1, 63), (2, 5, 128), (17, 5, 40), (1, 128, 63)]


@pytest.mark.parametrize("proj", [True, False], ids=["proj", "noproj"])
@pytest.mark.parametrize(("groups", "chunk", "d"), SHAPES)
def test_boundary_update(
    groups: int, chunk: int, d: int, proj: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Guards: mirrored taps, chunks that see each other, a cut tail."""
    T, conv = torch.randn(groups, chunk, d).to(dtype), torch.randn(d, 5).to(dtype)
    P = torch.randn(d, d).to(dtype) if proj else None
    wide = None if P is None else P.double()
    expected = naive_boundary.boundary_update(T.double(), conv.double(), wide, 0.3)
    P = None if P is None else P.to(device)
    V = kernel("boundary_update", device.type)(T.to(device), conv.to(device), P, 0.3)
    assert V.dtype == dtype
    assert_close(V.cpu(), expected, TOLERANCE[dtype])


def test_projection_of_any_strides(device: torch.device) -> None:
    """Guards: a transposed view that is read as if it were contiguous."""
    T, conv, P = torch.randn(2, 5, 63), torch.randn(63, 5), torch.randn(63, 63)
    expected = naive_boundary.boundary_update(T.double(), conv.double(), P.T.double(), 0.3)
    update = kernel("boundary_update", device.type)
    V = update(T.to(device), conv.to(device), P.to(device).T, 0.3)
    assert_close(V.cpu(), expected, TOLERANCE[torch.float32])


def test_chunks_are_independent(device: torch.device) -> None:
    """Guards: a chunk whose last bits, or whose NaN, come from another chunk in the batch."""
    T, conv, P = torch.randn(9, 16, 63), torch.randn(63, 5), torch.randn(63, 63)
    T, conv, P = T.to(device), conv.to(device), P.to(device)
    update = kernel("boundary_update", device.type)
    whole = update(T, conv, P, 0.1)
    for size in (1, 8):
        assert torch.equal(update(T[:size], conv, P, 0.1), whole[:size])
    T[4, 0, 0] = torch.nan
    spoiled = update(T, conv, P, 0.1)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(spoiled[others], whole[others]) and spoiled[4].isnan().any()


@pytest.mark.parametrize("src", [None, 1])
@pytest.mark.parametrize("runs", [[], [(0, 3)], [(70, 140), (0, 3)]], ids=str)
def test_fold(
    src: int | None, runs: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> None:
    """Guards: a base that keeps what its slot held before (NaN), or that misses a run."""
    H, V = torch.randn(150, 140).to(dtype), torch.randn(150, 63).to(dtype)
    H[4:60] = torch.nan
    D = torch.randn(3, 63, 140)
    D[2] = torch.nan
    expected = D.double()
    naive_fold.dense_update(expected, src, 2, runs, H.double(), V.double())
    D = D.to(device)
    kernel("dense_update", device.type)(D, src, 2, runs, H.to(device), V.to(device))
    assert_close(D.cpu(), expected, TOLERANCE[torch.float32])


@pytest.mark.parametrize(
    "stretches",
    [[], [(3, 4, 1), (0, 9, 1), (2, 30, 1)], [(0, 4, 40)], [(0, 50, 4), (9, 12, 2)]],
    ids=["none", "permuted", "prefill", "stretches"],
)
def test_append(
    stretches: list[tuple[int, int, int]], dtype: torch.dtype, device: torch.device
) -> None:
    """Guards: evidence in another row than planned, or a row that is touched without a plan."""
    h, t = torch.randn(45, 63).to(dtype), exact(torch.randn(45, 5000), dtype)
    H, V = torch.zeros(80, 63, dtype=dtype), torch.zeros(80, 5000, dtype=dtype)
    expected = H.clone(), V.clone()
    naive_append.tail_append(h, t, *expected, stretches)
    H, V = H.to(device), V.to(device)
    plan = plan_append(stretches, device)
    kernel("tail_append", device.type)(h.to(device), t.to(device), H, V, plan)
    assert torch.equal(H.cpu(), expected[0]) and torch.equal(V.cpu(), expected[1])


@pytest.mark.parametrize("selected", [None, [True, False, True, False]], ids=["all", "some"])
def test_selective_commit(
    selected: list[bool] | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Guards: a candidate published that was not selected, or another owner's."""
    src, dst = exact(torch.randn(5, 7, 450), dtype), torch.randn(6, 7, 450).to(dtype)
    a, b = torch.tensor([4, 1, 0, 2]), torch.tensor([1, 5, 0, 3])
    mask = None if selected is None else torch.tensor(selected)
    expected = dst.clone()
    naive_commit.selective_commit(src, expected, a, b, mask)
    result = dst.to(device)
    kernel("selective_commit", device.type)(
        src.to(device),
        result,
        a.to(device),
        b.to(device),
        None if mask is None else mask.to(device),
    )
    assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("base", [None, 1])
@pytest.mark.parametrize("pages", [(), (5, 2, 3)], ids=str)
def test_checkpoint(
    pages: tuple[int, ...], base: int | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Guards: pages in another order, layers mixed up, slots written that were not named."""
    chunk, depth = 4, 2
    H = torch.randn(depth, 7 * chunk, 600).to(dtype)
    V = torch.randn(depth, 7 * chunk, 63).to(dtype)
    D = torch.randn(depth, 3, 63, 600)
    expected = naive_checkpoint.checkpoint_write(H, V, D, pages, base, chunk)
    pools = [pool.to(device) for pool in (H, V, D)]
    checkpoint = kernel("checkpoint_write", device.type)(*pools, pages, base, chunk)
    for held, wanted in zip(checkpoint[1:], expected, strict=True):
        assert (held is None) == (wanted is None)
        if wanted is not None:
            assert torch.equal(held.cpu().flatten(), wanted.flatten())

    others, other_base = tuple(page + 1 for page in pages), None if base is None else 2
    filled = [torch.full_like(pool, torch.nan) for pool in pools]
    kernel("checkpoint_read", device.type)(checkpoint, *filled, others, other_base, chunk)
    again = naive_checkpoint.checkpoint_write(
        *(pool.cpu() for pool in filled), others, other_base, chunk
    )
    for held, wanted in zip(again, expected, strict=True):
        assert held is None or torch.equal(held, wanted)
    count = len(pages) * chunk * (600 + 63) + (0 if base is None else 63 * 600)
    assert sum(int((~pool.isnan()).sum()) for pool in filled) == depth * count
