"""The Hugging Face configuration class of ttt-lm-pytorch checkpoints, unknown to transformers."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from sgl_rwttt.backends.streaming_config import DEFAULTS, MODEL_TYPE


class TTTConfig(PretrainedConfig):
    """``model_type: "ttt"``: the published keys with their published defaults."""

    model_type = MODEL_TYPE

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"max_position_embeddings": 2048, **DEFAULTS, **kwargs})


def published(config: Any) -> dict[str, Any]:
    """The published keys of a configuration, before SGLang padded sizes for the CPU."""
    return {
        key: getattr(config, f"original_{key}", getattr(config, key, default))
        for key, default in DEFAULTS.items()
    }


def register_config() -> None:
    """Make ``model_type: "ttt"`` known to transformers in this process; idempotent."""
    AutoConfig.register(MODEL_TYPE, TTTConfig, exist_ok=True)
