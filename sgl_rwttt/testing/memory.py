"""Slots of a backend under test: poisoned while free, and compared by their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.core.candidate import Candidate
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.segment import DUMMY
from sgl_rwttt.core.slots import SlotPool
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.testing.case import Case, Item, SlotKind

Slot = tuple[SlotKind, int]
Memory = dict[Slot, bytes]


class Reading(NamedTuple):
    """What names a version's memory."""

    base: int | None
    pages: tuple[int, ...]


class PoisonedPool(SlotPool):
    """A slot pool whose free slots hold NaN."""

    def __init__(self, total: int, name: str, poison: Callable[[int], None]) -> None:
        super().__init__(total, name)
        self._poison = poison
        for slot in range(total):
            poison(slot)

    def free(self, slot: int) -> None:
        """Give a slot back and poison it."""
        super().free(slot)
        self._poison(slot)


def own_slots(candidate: Candidate) -> set[Slot]:
    """The slots that one candidate's forward may change, the dummy page included."""
    pages = {part.page for part in candidate.segment.parts if part.writes}
    found: set[Slot] = {("page", page) for page in {*pages, *candidate.pages, DUMMY}}
    return found | {("base", base) for base in candidate.bases}


def split(items: Sequence[Item]) -> tuple[list[int], ModeSpans]:
    """The tokens and their modes."""
    modes = ModeSpans()
    for _, mode in items:
        modes.append(1, mode)
    return [token for token, _ in items], modes


def row_errors(found: Tensor, expected: Tensor) -> Tensor:
    """RMS difference of each row [n]; NaN for a row with a NaN."""
    if found.shape != expected.shape:
        raise AssertionError(f"outputs {tuple(found.shape)}, the oracle's {tuple(expected.shape)}")
    return (found.double() - expected.double()).reshape(len(found), -1).square().mean(1).sqrt()


def as_bytes(tensors: dict[str, Tensor]) -> bytes:
    """The numbers of some tensors, bit by bit, with their names."""
    parts = [
        name.encode() + each.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, each in sorted(tensors.items())
    ]
    return b"".join(parts)


def names(slots: set[Slot]) -> str:
    """Slots for a message."""
    return ", ".join(f"{kind} {slot}" for kind, slot in sorted(slots))


def some(case: Case, count: int, seed: int, reads: float = 0.0) -> list[Item]:
    """Tokens, never the one that a case spoils; a share of them READ."""
    rng = Random(seed)
    return [
        (rng.randrange(case.vocab - 1), Effect.READ if rng.random() < reads else Effect.WRITE)
        for _ in range(count)
    ]
