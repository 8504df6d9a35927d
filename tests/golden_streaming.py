"""Golden vectors of the published TTT-Linear code (ttt-lm-pytorch), read from tests/data/golden.

Made at batch size 1, float32, CPU, on small random checkpoints: hidden 32, 2 heads, 2 layers,
mini-batch 16. The published code's own drift between prefill and decode on them is below 4e-6.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.golden import FOLDER

NAMES = ("ttt_linear_full", "ttt_linear_plain")
PREFILLS = (1, 15, 16, 17, 32, 33, 48)
STARTS = (16, 32)  # lengths of the prefill before the published decode


@dataclass(frozen=True)
class StreamingCase:
    """One checkpoint and what the published code computed with it."""

    name: str
    path: Path  # config.json, model.safetensors
    config: dict[str, Any]
    input_ids: list[int]  # 64
    prefill: dict[int, Tensor]  # length -> logits [length, vocab]
    decode: dict[int, Tensor]  # start -> logits [48 - start, vocab], token by token from there
    state: dict[tuple[int, int, str], Tensor]  # (start, layer, name) -> the cache after 48 tokens

    def weights(self) -> dict[str, Tensor]:
        """The checkpoint's tensors by their published names."""
        return load_file(self.path / "model.safetensors")


@cache
def streaming_case(name: str) -> StreamingCase:
    """Load one case."""
    path = FOLDER / name
    vectors = load_file(path / "expected" / "vectors.safetensors")
    state = {}
    for key, value in vectors.items():
        if key.startswith("state_after48."):
            _, start, layer, field = key.split(".")
            state[int(start[4:]), int(layer[5:]), field] = value
    return StreamingCase(
        name=name,
        path=path,
        config=json.loads((path / "config.json").read_text()),
        input_ids=vectors["input_ids"].tolist(),
        prefill={n: vectors[f"prefill_logits.{n}"] for n in PREFILLS},
        decode={n: vectors[f"decode_logits.{n}"] for n in STARTS},
        state=state,
    )
