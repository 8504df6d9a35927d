"""A Hugging Face checkpoint in memory, and as a folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A model in memory, float32. Its config and tensors belong to the holder, who may add."""

    config: dict[str, Any]  # the content of config.json
    weights: dict[str, Tensor]  # by Hugging Face name; no lm_head when the embeddings are tied
    encode: Callable[[str, bool], list[int]]  # ids of a text, with or without special tokens
    files: dict[str, str | Path]  # tokenizer and other small files: their text, or what to copy
    dtype: str  # of the weights where they came from: "float32", "bfloat16" or "float16"


def write_folder(folder: Path, checkpoint: Checkpoint, dtype: str) -> None:
    """Write config, weights in ``dtype`` and the other files into an existing folder."""
    kind = getattr(torch, dtype)
    tensors = {name: tensor.to(kind).contiguous() for name, tensor in checkpoint.weights.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {key: value for key, value in checkpoint.config.items() if key != "torch_dtype"}
    (folder / "config.json").write_text(json_text({**config, "dtype": dtype}), encoding="utf-8")
    for name, content in checkpoint.files.items():
        if isinstance(content, Path):
            shutil.copyfile(content, folder / name)
        else:
            (folder / name).write_text(content, encoding="utf-8")


def json_text(content: dict[str, Any]) -> str:
    """The text of a JSON file."""
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder``, which takes its place unless the block raises.

    What stood there before is removed then.
    """
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
        if folder.exists():
            shutil.rmtree(folder)
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
