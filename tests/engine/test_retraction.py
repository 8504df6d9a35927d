"""Owners that SGLang takes out of the batch every few steps, in an engine of their own.

Not beside another module's engine: closing one kills every child process.
"""

from __future__ import annotations

import os

import pytest

from tests.engine.served import Served, state
from tests.engine.test_prefix_cache import CASE, balanced, prompt

pytestmark = pytest.mark.engine


def test_retraction_every_few_steps() -> None:
    """Guards: a retracted owner resuming without its tail, or with rows counted twice."""
    os.environ["SGLANG_TEST_RETRACT"] = "true"
    os.environ["SGLANG_TEST_RETRACT_INTERVAL"] = "5"
    try:
        served = Served(CASE.path, max_total_tokens=700, ttt_memory_mb=1, chunked_prefill_size=9)
    finally:
        del os.environ["SGLANG_TEST_RETRACT"], os.environ["SGLANG_TEST_RETRACT_INTERVAL"]
    try:
        prompts = [prompt(20 + i, 5 + 3 * i) for i in range(6)]
        expected = []
        for tokens in prompts:
            served.flush()
            expected.append(served.generate(tokens, n=30))
        served.flush()
        answers = served.run(*(served.agenerate(tokens, n=30) for tokens in prompts))
        for got, want in zip(answers, expected, strict=True):
            assert got["output_ids"] == want["output_ids"]
            assert state(got)["state_id"] == state(want)["state_id"]
            assert state(got)["version"] == state(want)["version"]
        assert max(a["meta_info"].get("num_retractions", 0) for a in answers) > 0
        balanced(served)
    finally:
        served.close()
