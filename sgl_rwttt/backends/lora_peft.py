"""Adapter folders of the PEFT library: ``adapter_config.json``, ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sgl_rwttt.backends.lora_config import TARGETS, LoraDeltaConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

# key -> the values that leave a plain LoRA
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
}


class AdapterError(ValueError):
    """An adapter folder that does not fit; the message names the file and the key."""


def save_adapter(
    folder: Path, tensors: Mapping[str, Tensor], alpha: float, base_model: str
) -> None:
    """Write an adapter (named and shaped as by ``AdapterSlots.adapter``) as a PEFT folder.

    The folder is made when it does not exist; files of an older adapter in it are replaced.
    ``base_model`` is what the folder names as its base.
    """
    folder.mkdir(parents=True, exist_ok=True)
    targets = tuple(sorted({key.split(".")[0] for key in tensors}, key=TARGETS.index))
    depth, rank, _ = tensors[f"{targets[0]}.lora_A"].shape
    weights = {
        name: tensors[f"{target}.{factor}"][layer].float().cpu().contiguous()
        for name, target, factor, layer in _names(depth, targets)
    }
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")


def load_adapter(folder: Path, config: LoraDeltaConfig) -> dict[str, Tensor]:
    """Read a PEFT folder as ``AdapterSlots.restore`` takes it, float32.

    Raises AdapterError for a folder that is not a plain LoRA of this rank, alpha, these targets
    and all layers of this model, or that holds a number that is not finite.
    """
    _check_settings(_settings(folder), config)
    try:
        weights = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {error}") from error
    names = list(_names(config.shape.layers, config.targets))
    expected = {name: (target, factor) for name, target, factor, _ in names}
    for name in sorted(set(weights) ^ set(expected)):
        state = "is missing" if name in expected else "is of no target of this model"
        _refuse(WEIGHTS_FILE, f"{name} {state}")
    for name, (target, factor) in expected.items():
        d_in, d_out = config.shape.widths(target)
        shape = (config.rank, d_in) if factor == "lora_A" else (d_out, config.rank)
        if tuple(weights[name].shape) != shape:
            _refuse(WEIGHTS_FILE, f"{name} has shape {list(weights[name].shape)}, not {shape}")
        if not weights[name].isfinite().all():
            _refuse(WEIGHTS_FILE, f"{name} holds a number that is not finite")
    layers: dict[str, list[Tensor]] = {}
    for name, target, factor, _ in names:
        layers.setdefault(f"{target}.{factor}", []).append(weights[name].float())
    return {key: torch.stack(parts) for key, parts in layers.items()}


def adapter_digest(tensors: Mapping[str, Tensor]) -> str:
    """Identity of an adapter's numbers."""
    digest = blake2b(digest_size=16)
    for name in sorted(tensors):
        values = tensors[name].detach().float().cpu().contiguous()
        digest.update(f"{name} {tuple(values.shape)} ".encode() + values.numpy().tobytes())
    return digest.hexdigest()


def _names(depth: int, targets: tuple[str, ...]) -> Iterator[tuple[str, str, str, int]]:
    """(name in the file, target, factor, layer) of every tensor of an adapter."""
    for layer in range(depth):
        for target in targets:
            block = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            for factor in ("lora_A", "lora_B"):
                module = f"model.layers.{layer}.{block}.{target}"
                yield f"base_model.model.{module}.{factor}.weight", target, factor, layer


def _settings(folder: Path) -> dict[str, Any]:
    try:
        settings = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        _refuse(CONFIG_FILE, "it is not an object")
    return settings


def _check_settings(settings: dict[str, Any], config: LoraDeltaConfig) -> None:
    for key, allowed in _PLAIN.items():
        value = settings.get(key, allowed[0] if key != "peft_type" else None)
        if value not in allowed:
            _refuse(CONFIG_FILE, f"{key} is {value!r}; allowed: {allowed[0]!r}")
    for key, wanted in (("r", config.rank), ("lora_alpha", config.alpha)):
        if settings.get(key) != wanted:
            _refuse(CONFIG_FILE, f"{key} is {settings.get(key)!r}, the rule's is {wanted!r}")


def _refuse(file: str, reason: str) -> NoReturn:
    raise AdapterError(f"{file}: {reason}")
