"""A checkpoint without ttt_mode is served by stock code, untouched."""

from __future__ import annotations

import os

import pytest

from sgl_rwttt.srt_ext.options import ENV_ACTIVE
from sgl_rwttt.srt_ext.plugin import ENV_MODELS
from tests.engine.served import Served
from tests.golden import golden_case

pytestmark = pytest.mark.engine
CASE = golden_case("qwen3_embed_noproj")


def test_without_ttt_mode() -> None:
    """Guards: the plugin changing what it was not asked to serve, or a mode left over from an
    engine that ran before in this process."""
    os.environ[ENV_ACTIVE] = "1"
    os.environ[ENV_MODELS] = "sgl_rwttt.srt_ext.models"
    served = Served(CASE.path, json_model_override_args='{"ttt_mode": false}')
    try:
        assert ENV_ACTIVE not in os.environ
        assert ENV_MODELS not in os.environ
        answer = served.generate(CASE.prompt_ids, n=len(CASE.generated_ids))
        assert "state" not in answer["meta_info"]
        assert answer["output_ids"] != CASE.generated_ids, "the fast weights made no difference"
    finally:
        served.close()
