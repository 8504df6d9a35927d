"""Does a conversion help? Measured on documents that it was not made with."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .eager import EagerModel

LENGTH = 448  # tokens of each document
LEAST = 0.001  # share of the loss by which it has to fall to count


@dataclass(frozen=True)
class Change:
    """Mean losses in an empty context, nats per token, before and after adapting."""

    before: float
    after: float
    mean: float  # of the differences, document by document
    error: float  # standard error of that mean
    n: int

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Change:
        """From (before, after) of at least two documents."""
        n, differences = len(pairs), [after - before for before, after in pairs]
        mean = statistics.fmean(differences)
        variance = math.fsum((each - mean) ** 2 for each in differences) / (n - 1)
        before, after = (statistics.fmean(side) for side in zip(*pairs, strict=True))
        return cls(before, after, mean, math.sqrt(variance / n), n)

    def __str__(self) -> str:
        percent = 100 * self.mean / self.before
        return (
            f"{self.before:.3f} -> {self.after:.3f} nats per token, change {self.mean:+.4f} "
            f"+- {self.error:.4f} ({percent:+.1f} %, n = {self.n})"
        )


@dataclass(frozen=True)
class HeldOut:
    """What adapting on a document did, with its context dropped."""

    reread: Change  # to the loss on the document itself
    unrelated: Change  # to the loss on another one

    @property
    def helps(self) -> bool:
        """Whether documents got cheaper, by two standard errors and `LEAST` of the loss."""
        fall = -self.reread.mean
        return fall > 2 * self.reread.error and fall > LEAST * self.reread.before

    @property
    def harms(self) -> bool:
        """Whether other texts got dearer, by two standard errors and a tenth of the gain."""
        rise = self.unrelated.mean
        return rise > 2 * self.unrelated.error and rise > 0.1 * abs(self.reread.mean)

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not math.isfinite(self.reread.after + self.unrelated.after):
            return "It breaks the model: the loss after adapting is not finite."
        if not self.helps:
            return "It does not help: adapting on a document does not make it cheaper to read."
        if self.harms:
            return "It helps on the document, but makes unrelated text dearer."
        return "It helps: a document is cheaper after adapting on it, and other text is not dearer."


def check(
    model: EagerModel, documents: Mapping[str, Sequence[int]], tick: Callable[[], None]
) -> HeldOut:
    """Adapt on each document in turn; leaves the model as it was.

    ``documents`` are token ids by name, at least two. `tick` is called 4 times per document.
    """
    names = list(documents)
    before = {}
    for name in names:
        before[name] = model.loss(documents[name])
        tick()
    own, other = [], []
    for name, neighbour in zip(names, [*names[1:], names[0]], strict=True):
        try:
            model.write(documents[name])
            tick()
            own.append((before[name], model.loss(documents[name])))
            tick()
            other.append((before[neighbour], model.loss(documents[neighbour])))
            tick()
        finally:
            model.reset()
    return HeldOut(Change.of(own), Change.of(other))
