"""Between text and token ids: nothing that was generated is ever encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HOLE = "\ufffd"  # what an incomplete character decodes to
_TAIL = 6  # tokens of context that settle how the next ones decode


@dataclass(frozen=True, slots=True)
class Settled:
    """An answer after trimming."""

    kept: int  # output ids that stay in the lineage
    text: str  # what the program sees, `left_over` included
    left_over: str  # end of `text` that no kept id covers: a token was cut
    mended: int  # HOLE characters at the end of the text so far that `text` replaces


class TokenText:
    """Encodes what a program adds and decodes what a model says, with one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.prefix = _added_prefix(tokenizer)

    def encode(self, text: str, at_root: bool) -> list[int]:
        """Ids of `text` alone; only at the root of a context with the tokenizer's BOS."""
        ids = list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []
        if at_root and ids[: len(self.prefix)] != self.prefix:
            return self.prefix + ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        decoded = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(decoded)

    def after(self, before: Sequence[int], ids: Sequence[int]) -> tuple[str, int]:
        """(text of `ids` behind `before`, number of HOLEs at the end of `before` it replaces)."""
        tail = list(before[-_TAIL:])
        if not tail:
            return self.decode(ids), 0
        shown = self.decode(tail)
        stable = shown.rstrip(HOLE)
        return self.decode([*tail, *ids])[len(stable) :], len(shown) - len(stable)

    def settle(
        self, before: Sequence[int], ids: Sequence[int], reason: Mapping[str, Any], stops: list[str]
    ) -> Settled:
        """Trim the stop string or stop token that ended an answer from its text and its ids.

        `before` are the ids in front of the answer, `reason` is SGLang's finish_reason. A match of
        a stop_regex stays, as in SGLang.
        """
        matched = reason.get("matched")
        if isinstance(matched, int) and ids and ids[-1] == matched:
            ids = ids[:-1]
        text, mended = self.after(before, ids)
        cut = first_stop(text, stops) if isinstance(matched, str) else None
        if cut is None:
            return Settled(len(ids), text, "", mended) if ids else Settled(0, "", "", 0)
        text = text[:cut]
        for kept in range(len(ids), 0, -1):
            covered, _ = self.after(before, ids[:kept])
            if text.startswith(covered):
                return Settled(kept, text, text[len(covered) :], mended)
        return Settled(0, "", "", 0) if mended else Settled(0, text, text, 0)

    def speakable(self, text: str, stops: list[str]) -> str:
        """The part of a growing answer that no later token can take back."""
        cut = first_stop(text, stops)
        if cut is not None:
            return text[:cut]
        held = max((_overlap(text, stop) for stop in stops), default=0)
        return text[: len(text) - held].rstrip(HOLE)


def first_stop(text: str, stops: list[str]) -> int | None:
    """Position of the earliest stop string in `text`."""
    found = [at for at in (text.find(stop) for stop in stops if stop) if at >= 0]
    return min(found, default=None)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for n in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0


def _added_prefix(tokenizer: Any) -> list[int]:
    """The ids that the tokenizer puts in front of a text (BOS), none for most chat models."""
    bare = list(tokenizer.encode("a", add_special_tokens=False))
    full = list(tokenizer.encode("a", add_special_tokens=True))
    for n in range(len(full) - len(bare) + 1):
        if full[n : n + len(bare)] == bare:
            return full[:n]
    return []
