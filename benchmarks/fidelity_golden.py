"""The published In-Place TTT code's vectors through the served engine, for check_fidelity.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fidelity_worker import FidelityJob

from sgl_rwttt.srt_ext.launch import engine_defaults

FOLDER = Path(__file__).resolve().parents[1] / "tests" / "data" / "golden"
OWNERS = 4


def golden_cases() -> list[Path]:
    """The In-Place checkpoints with expected vectors."""
    return sorted(each for each in FOLDER.iterdir() if not each.name.startswith("ttt_linear"))


def golden_job(folder: Path, rules: Sequence[str | None]) -> FidelityJob:
    """Owners of a golden case that begin to decode at different places."""
    from safetensors.torch import load_file

    vectors = load_file(folder / "expected" / "vectors.safetensors")
    prompt, generated = (vectors[f"{each}_ids"].tolist() for each in ("prompt", "generated"))
    engine = engine_defaults(
        folder, dtype="float32", skip_tokenizer_init=True, max_running_requests=OWNERS
    )
    return FidelityJob(
        model=str(engine.pop("model_path")),
        options=engine,
        state={"ttt_memory_mb": 16},
        tokens=[prompt + generated] * OWNERS,
        prompts=[1] * OWNERS,
        read=[len(prompt) - 1 + n for n in range(OWNERS)],
        compared=OWNERS,
        top=vectors["prefill_logits"].shape[1],
        rules=list(rules),
    )


def golden_difference(folder: Path, owners: Sequence[dict[str, Any]]) -> float:
    """Largest difference of a log-probability from the published code's, over whole vocabularies.

    The first owner is compared with its prefill and decode, the others, which read generated tokens
    in the prefill, with its prefill of all tokens.
    """
    import torch
    from safetensors.torch import load_file

    vectors = load_file(folder / "expected" / "vectors.safetensors")
    decoded = torch.cat([vectors["prefill_logits"], vectors["decode_logits"]])
    largest = 0.0
    for index, owner in enumerate(owners):
        logits = vectors["replay_logits"] if index else decoded
        wanted = torch.log_softmax(logits[:-1].double(), -1)
        got = torch.full_like(wanted, math.nan)
        for row, top in enumerate(owner["top"]):
            tokens, values = zip(*top, strict=True)
            got[row, list(tokens)] = torch.tensor(values, dtype=got.dtype)
        gap = float((got - wanted).abs().max())
        largest = max(largest, math.inf if math.isnan(gap) else gap)
    return largest
