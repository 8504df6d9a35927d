"""All backends of this package, and the third-party example, pass the published suite."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from sgl_rwttt.testing.backend_conformance import CHECKS, Case
from tests.backends.broken_backends import BROKEN, Broken
from tests.backends.conformance_cases import InPlaceCase, LoraCase, StreamingCase, toy

CASES: dict[str, Callable[[], Case]] = {
    "in_place": lambda: InPlaceCase(0),
    "in_place, folded": lambda: InPlaceCase(2),
    "streaming": lambda: StreamingCase("ttt_linear_full", 5),
    "lora_delta": LoraCase,
    "running_mean": lambda: toy().RunningMeanCase(0),
    "running_mean, folded": lambda: toy().RunningMeanCase(2),
}


@cache
def case_of(name: str) -> Case:
    return CASES[name]()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", CASES)
def test_conformance(name: str, check: str) -> None:
    """A backend that breaks what the store, or another owner, relies on."""
    CHECKS[check](case_of(name))


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.backend.__name__)
def test_a_broken_backend_is_found(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that nothing can fail."""
    monkeypatch.setattr(toy(), "RunningMean", broken.backend)
    monkeypatch.setattr(toy(), "LAYERS", broken.layers)
    with pytest.raises(AssertionError, match=broken.message):
        CHECKS[broken.check](toy().RunningMeanCase(0))


def test_every_check_can_fail() -> None:
    """A check without a backend that it refuses."""
    assert {broken.check for broken in BROKEN} == set(CHECKS)


def test_a_blind_case_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case whose outputs do not show the state passes whatever the backend does."""
    monkeypatch.setattr(toy(), "LR", 0.0)
    with pytest.raises(AssertionError, match="the case is blind"):
        CHECKS["oracle_equality"](toy().RunningMeanCase(0))
