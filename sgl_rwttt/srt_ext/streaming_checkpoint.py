"""Early checks of a TTT-Linear checkpoint: names and shapes as ttt-lm-pytorch publishes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sgl_rwttt.backends.streaming_config import ARCHITECTURE, MODEL_TYPE, StreamingConfig
from sgl_rwttt.backends.streaming_model import StreamingModel

from .weights import CheckpointError, check_shapes


def is_streaming(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of the ttt-lm-pytorch family."""
    return config.get("model_type") == MODEL_TYPE


def streaming_rule(config: Mapping[str, Any]) -> StreamingConfig:
    """The rule of a config.json; raises CheckpointError or ValueError naming the key."""
    architectures = config.get("architectures") or [None]
    if architectures[0] != ARCHITECTURE:
        raise CheckpointError(
            f"model_type is {MODEL_TYPE!r} but architecture {architectures[0]!r} is not "
            f"{ARCHITECTURE!r}"
        )
    return StreamingConfig.from_hf(config)


def expected_shapes(config: StreamingConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a checkpoint of this config must hold."""
    with torch.device("meta"):
        model = StreamingModel(config)
    shapes = {f"model.{name}": tuple(each.shape) for name, each in model.named_parameters()}
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab, config.d_model)
    return shapes


def is_derived(name: str, config: StreamingConfig) -> bool:
    """Whether a tensor follows from the others: rotary tables, a tied output projection."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def check_streaming_weights(found: Mapping[str, tuple[int, ...]], config: StreamingConfig) -> None:
    """Raise CheckpointError naming the first tensor that is missing, misshapen or unknown."""
    expected = expected_shapes(config)
    check_shapes(found, expected)
    for name in found:
        if name not in expected and not is_derived(name, config):
            raise CheckpointError(f"the checkpoint holds {name}, which its config has no use for")
