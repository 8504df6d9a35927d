"""BoundaryUpdate against torch's own convolution."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.boundary_update import naive
from tests.assert_close import assert_close

update = kernel("boundary_update")


def published(T: Tensor, conv: Tensor, proj: Tensor | None, lr: float) -> Tensor:
    """The rule as published: conv1d with padding 2 over each chunk, proj as right factor."""
    d = T.shape[2]
    mixed = F.conv1d(T.transpose(1, 2), conv.reshape(d, 1, 5), padding=2, groups=d)
    mixed = mixed.transpose(1, 2)
    return lr * (mixed if proj is None else mixed @ proj)


@pytest.mark.parametrize("proj", [True, False], ids=["proj", "noproj"])
@pytest.mark.parametrize("d", [1, 63, 64])
@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 8, 33])
@pytest.mark.parametrize("groups", [1, 3])
def test_against_conv1d(groups: int, chunk: int, d: int, proj: bool) -> None:
    """Taps that are mirrored or shifted, padding at one end only, chunks that see each other."""
    torch.manual_seed(0)
    T, conv = torch.randn(groups, chunk, d).double(), torch.randn(d, 5).double()
    P = torch.randn(d, d).double() if proj else None
    expected = published(T, conv, P, 0.3)
    assert_close(update(T, conv, P, 0.3), expected, 1e-12)
    assert_close(naive.boundary_update(T, conv, P, 0.3), expected, 1e-12)
    single = update(T.float(), conv.float(), None if P is None else P.float(), 0.3)
    assert single.dtype == torch.float32
    assert_close(single, expected, 1e-5)


@pytest.mark.parametrize(("chunk", "d"), [(1, 16), (4, 63), (32, 576)])
def test_chunks_are_independent(chunk: int, d: int) -> None:
    """A chunk whose last bits, or whose NaN, come from another chunk in the batch."""
    torch.manual_seed(0)
    T, conv, P = torch.randn(9, chunk, d), torch.randn(d, 5), torch.randn(d, d)
    whole = update(T, conv, P, 0.1)
    for size in (1, 2, 8):
        assert torch.equal(update(T[:size], conv, P, 0.1), whole[:size])
    T[4, 0, 0] = torch.nan
    spoiled = update(T, conv, P, 0.1)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(spoiled[others], whole[others]) and spoiled[4].isnan().any()


def test_changes_no_input() -> None:
    """Targets that are overwritten before the candidate is known to be good."""
    T, conv, P = torch.randn(2, 4, 8), torch.randn(8, 5), torch.randn(8, 8)
    copies = T.clone(), conv.clone(), P.clone()
    update(T, conv, None, 0.1)
    update(T, conv, P, 0.1)
    assert all(torch.equal(a, b) for a, b in zip((T, conv, P), copies, strict=True))
