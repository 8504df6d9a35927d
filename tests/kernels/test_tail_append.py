"""TailBufferUpdate and fold against one row at a time."""

from __future__ import annotations

import pytest
import torch

from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.dense_update import naive as naive_fold
from sgl_rwttt.kernels.tail_append import naive as naive_append
from sgl_rwttt.kernels.tail_append.plan import plan_append
from tests.assert_close import assert_close

STRETCHES = {
    "none": [],
    "decode": [(i, 5 * i + 3, 1) for i in range(4)],
    "decode, permuted": [(3, 4, 1), (0, 9, 1), (2, 30, 1)],
    "prefill": [(0, 4, 40)],
    "prefill in blocks": [(0, 30, 16), (16, 46, 16), (32, 62, 2)],
    "broken blocks": [(0, 50, 4), (4, 8, 4), (9, 12, 2)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", STRETCHES)
def test_append(name: str, dtype: torch.dtype) -> None:
    """Evidence in another row or page than planned, or a row that is touched without a plan."""
    torch.manual_seed(0)
    stretches = STRETCHES[name]
    h, t = torch.randn(45, 7).to(dtype), torch.randn(45, 3)
    H, V = torch.zeros(80, 7, dtype=dtype), torch.zeros(80, 3, dtype=dtype)
    expected = H.clone(), V.clone()
    naive_append.tail_append(h, t, *expected, stretches)
    kernel("tail_append")(h, t, H, V, plan_append(stretches, torch.device("cpu")))
    assert torch.equal(H, expected[0]) and torch.equal(V, expected[1])


@pytest.mark.parametrize("src", [None, 1])
@pytest.mark.parametrize("runs", [[], [(0, 3)], [(7, 12), (0, 3)]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fold(src: int | None, runs: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """A base that keeps what its slot held before (NaN), or that misses a run."""
    torch.manual_seed(0)
    H, V = torch.randn(12, 9).to(dtype), torch.randn(12, 5).to(dtype)
    H[4:6] = torch.nan
    D = torch.randn(3, 5, 9)
    D[2] = torch.nan
    expected = D.double()
    naive_fold.dense_update(expected, src, 2, runs, H, V)
    kernel("dense_update")(D, src, 2, runs, H, V)
    assert_close(D, expected, 1e-6)


def test_fold_into_itself() -> None:
    """A base that others still read, changed under them."""
    D = torch.zeros(3, 5, 9)
    with pytest.raises(ValueError, match="slot 1"):
        kernel("dense_update")(D, 1, 1, [], torch.zeros(1, 9), torch.zeros(1, 5))
