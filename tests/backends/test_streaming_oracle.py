"""The eager loop that the engine is tested against, itself against the published code."""

from __future__ import annotations

import pytest

from tests.backends.streaming_oracle import EagerTTT
from tests.golden_streaming import NAMES, streaming_case


@pytest.mark.parametrize("name", NAMES)
def test_eager_loop_is_the_published_model(name: str) -> None:
    """Guards: an oracle that has the package's mistakes."""
    case = streaming_case(name)
    eager = EagerTTT(case)
    logits = eager.feed(case.input_ids[:48])
    assert (logits - case.prefill[48]).abs().max() < 2e-5
    for n, state in enumerate(eager.layers):
        for field, expected in (("W", "W1_states"), ("b", "b1_states")):
            assert (state[field] - case.state[16, n, expected]).abs().max() < 2e-5
