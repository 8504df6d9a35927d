"""Golden vectors of the published In-Place TTT code, read from tests/data/golden.

Made with transformers 4.57.3 at batch size 1, float32, CPU, on small random checkpoints. The
published code's own drift between prefill and decode on them is below 2.5e-5.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

FOLDER = Path(__file__).parent / "data" / "golden"


@dataclass(frozen=True)
class GoldenCase:
    """One checkpoint and what the published code computed with it."""

    name: str
    path: Path  # a loadable model folder: config.json, model.safetensors
    config: dict[str, Any]
    prompt_ids: list[int]
    generated_ids: list[int]  # greedy
    prefill_logits: Tensor  # [P, vocab]
    decode_logits: Tensor  # [G, vocab], row i after feeding generated_ids[i]
    replay_logits: Tensor  # [P + G, vocab], one prefill over prompt + generated
    initial_weight: dict[int, Tensor]  # layer -> [d, d_ff]
    final_fast_weight: dict[int, Tensor]  # layer -> [d, d_ff], after all tokens
    tail_hidden: dict[int, Tensor]  # layer -> h rows of the open chunk [rows, d_ff]; may be empty
    tail_target: dict[int, Tensor]  # layer -> target rows [rows, d]

    def weights(self) -> dict[str, Tensor]:
        """The checkpoint's tensors by their published names."""
        return load_file(self.path / "model.safetensors")


def golden_names() -> list[str]:
    """Names of the In-Place cases, for test ids."""
    return sorted(
        folder.name
        for folder in FOLDER.iterdir()
        if (folder / "config.json").exists() and not folder.name.startswith("ttt_linear_")
    )


@cache
def golden_case(name: str) -> GoldenCase:
    """Load one case."""
    path = FOLDER / name
    vectors = load_file(path / "expected" / "vectors.safetensors")

    def by_layer(kind: str) -> dict[int, Tensor]:
        prefix = f"{kind}."
        return {int(k[len(prefix) :]): v for k, v in vectors.items() if k.startswith(prefix)}

    return GoldenCase(
        name=name,
        path=path,
        config=json.loads((path / "config.json").read_text()),
        prompt_ids=vectors["prompt_ids"].flatten().tolist(),
        generated_ids=vectors["generated_ids"].flatten().tolist(),
        prefill_logits=vectors["prefill_logits"],
        decode_logits=vectors["decode_logits"],
        replay_logits=vectors["replay_logits"],
        initial_weight=by_layer("initial_weight"),
        final_fast_weight=by_layer("final_fast_weight"),
        tail_hidden=by_layer("tail_hidden"),
        tail_target=by_layer("tail_target"),
    )


def golden_cases() -> list[GoldenCase]:
    """All cases."""
    return [golden_case(name) for name in golden_names()]
