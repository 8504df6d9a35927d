"""A checkpoint folder as the Hub has them: config.json, safetensors files, a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from .checkpoint import WEIGHTS, Checkpoint

ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
_INDEX = WEIGHTS + ".index.json"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_COPIED = (  # of what lies beside the weights; programs (*.py) are never copied
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
    "LICENSE.txt",
)


def read_folder(folder: Path) -> Checkpoint:
    """Read a llama or qwen3 checkpoint into memory, float32.

    Raises ValueError naming what is missing or not supported, before weights are read if it can.
    """
    config = read_config(folder)
    found: dict[str, Tensor] = {}
    kinds: set[str] = set()
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if not name.endswith("rotary_emb.inv_freq"):  # computed, not learnt
                        kinds.add(file.get_slice(name).get_dtype())
                        found[name] = file.get_tensor(name).float()
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    if config.get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    if not kinds <= set(_DTYPES):
        raise ValueError(f"{folder}: weights of type {sorted(kinds - set(_DTYPES))}")
    kind = next(name for name in _DTYPES if name in kinds)  # the widest
    files: dict[str, str | Path] = {
        name: folder / name for name in _COPIED if (folder / name).is_file()
    }
    return Checkpoint(config, found, _encoder(folder), files, _DTYPES[kind])


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a model that can be converted; raises ValueError with the reason."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no checkpoint folder: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        architectures = config.get("architectures")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a JSON object: {error}") from error
    name = (architectures or [None])[0]
    if name not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise ValueError(f"{folder}: architecture {name} is not supported, only {known}")
    if config.get("ttt_mode"):
        raise ValueError(f"{folder} is a TTT checkpoint already (ttt_mode in its config.json)")
    if config.get("quantization_config"):
        raise ValueError(f"{folder} is quantized: give the checkpoint that it was made from")
    if config.get("hidden_act") != "silu":
        raise ValueError(f"{folder}: hidden_act is {config.get('hidden_act')!r}, not 'silu'")
    return {**config, "tie_word_embeddings": bool(config.get("tie_word_embeddings", False))}


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files: those of the index, else all."""
    index = folder / _INDEX
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of weights: {error!r}") from error
        files = [folder / Path(name).name for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which {_INDEX} names")
    if not files:
        raise ValueError(
            f"{folder} has no *.safetensors; pickled weights are not read: load the model with "
            "transformers and save it again"
        )
    return files


def _encoder(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of many kinds: it looks into config.json, too
        raise ValueError(f"{folder}: the tokenizer cannot be loaded: {error}") from error

    def encode(text: str, special: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=special))

    return encode
