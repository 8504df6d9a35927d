"""Early checks of a TTT checkpoint folder: before any process is spawned or memory is taken.

The format is the published In-Place TTT one: ``ttt_*`` keys in ``config.json`` and, per TTT layer
``N``, ``model.layers.N.mlp.ttt_conv.weight`` [d, 1, 5] and ``model.layers.N.mlp.ttt_proj.weight``
[d, d].
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sgl_rwttt.backends.in_place import InPlaceConfig
from sgl_rwttt.backends.streaming_config import MODEL_TYPE, StreamingConfig

from .options import TTTOptions
from .streaming_checkpoint import check_streaming_weights, is_streaming, streaming_rule
from .weights import CheckpointError, check_shapes

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
CONV_TAPS = 5
_MAX_HEADER_BYTES = 100_000_000


def read_config(model_path: str, overrides: str | None = None) -> dict[str, Any]:
    """``config.json`` of a local or hub checkpoint with ``--json-model-override-args`` applied."""
    from transformers import PretrainedConfig

    config, _ = PretrainedConfig.get_config_dict(model_path)
    config.update(json.loads(overrides or "{}"))
    return dict(config)


def is_ttt(config: dict[str, Any]) -> bool:
    """Whether a config asks for test-time training; raises CheckpointError for a non-boolean."""
    flag = config.get("ttt_mode", is_streaming(config))
    if not isinstance(flag, bool):
        raise CheckpointError(f"config key ttt_mode must be true or false, got {flag!r}")
    return flag


def expected_weights(config: InPlaceConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every TTT tensor that a checkpoint of this config must hold."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in config.layers:
        prefix = f"model.layers.{layer}.mlp."
        shapes[prefix + "ttt_conv.weight"] = (config.d_model, 1, CONV_TAPS)
        if config.proj:
            shapes[prefix + "ttt_proj.weight"] = (config.d_model, config.d_model)
    return shapes


def check_weights(found: dict[str, tuple[int, ...]], config: InPlaceConfig) -> None:
    """Raise CheckpointError naming the first TTT tensor that is missing, misshapen or unknown."""
    expected = expected_weights(config)
    check_shapes(found, expected)
    for name in found:
        if ".ttt_" in name and name not in expected:
            raise CheckpointError(
                f"the checkpoint holds {name}, but ttt_layers={list(config.layers)} and "
                f"ttt_proj={config.proj} do not ask for it"
            )


def safetensors_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor in the folder's ``*.safetensors``, from the headers alone."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            raw = stream.read(8)
            size = struct.unpack("<Q", raw)[0] if len(raw) == 8 else 0
            if not 0 < size <= _MAX_HEADER_BYTES:
                raise CheckpointError(f"{file.name} is not a safetensors file")
            try:
                header = json.loads(stream.read(size))
            except ValueError as error:
                raise CheckpointError(f"{file.name} has a broken header: {error}") from error
        shapes.update({k: tuple(v["shape"]) for k, v in header.items() if k != "__metadata__"})
    return shapes


def check_adapters(config: dict[str, Any], options: TTTOptions) -> None:
    """Validate a checkpoint that is to be served with ``--ttt-backend lora_delta``.

    Raises CheckpointError or ValueError naming the config key, architecture, flag or adapter file.
    """
    from .rules import lora_configs

    if is_streaming(config):
        raise CheckpointError(
            f"--ttt-backend=lora_delta cannot be combined with model_type {MODEL_TYPE!r}, whose "
            "layers are a state themselves"
        )
    if is_ttt(config):
        raise CheckpointError(
            "--ttt-backend=lora_delta cannot be combined with ttt_mode: true, which asks for fast "
            "weights: set ttt_mode to false with --json-model-override-args"
        )
    _check_architecture(config, "--ttt-backend=lora_delta is asked for")
    lora_configs(options, config)


def _check_architecture(config: dict[str, Any], why: str) -> None:
    architectures = config.get("architectures") or [None]
    if architectures[0] not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(
            f"{why} but architecture {architectures[0]!r} is not one of "
            f"{list(SUPPORTED_ARCHITECTURES)}"
        )


def check_checkpoint(model_path: str, config: dict[str, Any]) -> InPlaceConfig | StreamingConfig:
    """Validate a TTT checkpoint and return its rule's configuration.

    Raises CheckpointError or ValueError naming the config key, architecture or tensor. A folder
    without safetensors files is checked when its weights are loaded.
    """
    folder = Path(model_path)
    shapes = safetensors_shapes(folder) if folder.is_dir() else {}
    if is_streaming(config):
        streaming = streaming_rule(config)
        if shapes:
            check_streaming_weights(shapes, streaming)
        return streaming
    _check_architecture(config, "ttt_mode is true")
    rule = InPlaceConfig.from_hf(SimpleNamespace(**config))
    if shapes:
        check_weights(shapes, rule)
    return rule
