"""One numerical comparison for all tests."""

from __future__ import annotations

from torch import Tensor


def rmse_ratio(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of ``expected``; of the difference alone where
    ``expected`` is zero."""
    error = (actual.double() - expected.double()).square().mean().sqrt().item()
    scale = expected.double().square().mean().sqrt().item()
    return error / scale if scale > 0 else error


def assert_close(actual: Tensor, expected: Tensor, ratio: float = 1e-5, name: str = "") -> None:
    """Fail on another shape, on any number that is not finite, or above the RMSE ``ratio``."""
    assert actual.shape == expected.shape, f"{name} {actual.shape} is not {expected.shape}"
    if actual.numel() == 0:
        return
    for which, tensor in (("actual", actual), ("expected", expected)):
        bad = int((~tensor.isfinite()).sum())
        assert bad == 0, f"{name} {which}: {bad} of {tensor.numel()} numbers are not finite"
    found = rmse_ratio(actual, expected)
    assert found <= ratio, f"{name} RMSE ratio {found:.3g} > {ratio:.3g}"
