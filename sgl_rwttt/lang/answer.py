"""What comes back from a model."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .transport import Json


@dataclass(frozen=True, slots=True)
class Answer:
    """What a gen said, trimmed; while it streams, what it said so far."""

    text: str
    meta: Json
    mended: int  # incomplete characters at the end of the text so far that `text` replaces


@dataclass(frozen=True, slots=True)
class Score:
    """Log-probabilities (natural) of a text at a point of a lineage."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def sum(self) -> float:
        """Log-probability of the whole text."""
        return math.fsum(self.logprobs)

    @property
    def mean(self) -> float:
        """Log-probability per token."""
        return self.sum / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp(-mean)."""
        return math.exp(-self.mean)


def finish_reason(item: Json) -> Json:
    """SGLang's finish_reason, empty while the answer grows."""
    return item.get("meta_info", {}).get("finish_reason") or {}


def grown(ids: list[int], item: Json) -> list[int]:
    """All output ids so far, whether the server streams increments or the whole."""
    new = list(item.get("output_ids") or ())
    is_whole = item["meta_info"].get("completion_tokens", len(new)) == len(new)
    return new if is_whole else [*ids, *new]
