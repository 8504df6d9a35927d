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
    """Log-probabilities of a text at a place of a lineage, from `State.score`."""

    tokens: tuple[int, ...]  # ids of the text
    logprobs: tuple[float, ...]  # nats, one per token

    @property
    def sum(self) -> float:
        """Log-probability of the whole text, in nats."""
        return math.fsum(self.logprobs)

    @property
    def mean(self) -> float:
        """Log-probability per token, in nats; -mean is the loss."""
        return self.sum / len(self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp(-mean)."""
        return math.exp(-self.mean)


def finish_reason(item: Json) -> Json:
    """SGLang's finish_reason, empty while the answer grows."""
    return item.get("meta_info", {}).get("finish_reason") or {}


def grown(before: Json, item: Json) -> Json:
    """`item` with all output ids and their logprobs so far.

    `before` is what this returned for the last item of the stream, {} at first: a server streams
    increments or the whole.
    """
    ids, meta = list(item.get("output_ids") or ()), item["meta_info"]
    if before and meta.get("completion_tokens", len(ids)) != len(ids):
        ids = [*before["output_ids"], *ids]
        for name in ("output_token_logprobs", "output_top_logprobs"):
            if name in meta:
                meta = {**meta, name: [*before["meta_info"].get(name, ()), *meta[name]]}
    return {**item, "output_ids": ids, "meta_info": meta}
