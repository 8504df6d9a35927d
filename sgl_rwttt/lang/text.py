"""Between text and token ids: nothing that was generated is ever encoded again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sgl_rwttt.core.errors import InvalidStateRequest

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
        """Ids of `text` alone; only at the root of a context with the tokenizer's BOS.

        Raises InvalidStateRequest for half a surrogate pair.
        """
        try:
            ids = list(self.tokenizer.encode(text, add_special_tokens=False)) if text else []
        except (TypeError, UnicodeError):
            raise InvalidStateRequest(f"{text[:40]!r} is no text that UTF-8 can hold") from None
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
        """(text of `ids` behind `before`, number of HOLEs at the end of `before` it replaces).

        A HOLE is replaced when the ids complete its character; one that stays is no part of the
        text.
        """
        shown, whole = self._shown(before, ()), self._shown(before, ids)
        stable = _agreement(shown, whole)
        return whole[stable:], len(shown) - stable

    def _shown(self, before: Sequence[int], ids: Sequence[int]) -> str:
        seen = [*before[-_TAIL:], *ids]
        return self.decode(seen) if seen else ""

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
            return Settled(len(ids), text, "", mended)
        whole = self._shown(before, ids)
        whole = whole[: len(whole) - len(text) + cut]
        for kept in range(len(ids), -1, -1):
            covered = self._shown(before, ids[:kept])
            if whole.startswith(covered):
                return Settled(kept, text[:cut], whole[len(covered) :], mended)
        return Settled(0, "", "", 0)

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


def _agreement(one: str, other: str) -> int:
    """Length of the longest common beginning."""
    for n, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return n
    return min(len(one), len(other))


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
