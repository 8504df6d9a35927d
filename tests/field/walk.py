"""A random walk over all that can happen to owners, on the store and the real backend."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import StateCapacity
from tests.field.rig import READ, WRITE, C, Field, Owner, Row

SHAPES = (
    {"pages": 14, "bases": 1, "fold_pages": 0},
    {"pages": 20, "bases": 4, "fold_pages": 2},
    {"pages": 28, "bases": 3, "fold_pages": 1},
    {"pages": 90, "bases": 6, "fold_pages": 3},
)
TOKENS = (1, 1, 1, 2)  # few, so that contexts meet
LONGEST = 9 * C
MOST_OWNERS = 7


class Walk:
    """Operations drawn by weight; each is followed by the field's audit, answers by the oracle's.

    Equal seeds give equal walks. `done` counts what happened.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.field = Field(**SHAPES[seed % len(SHAPES)])
        self.done: Counter[str] = Counter()
        self._names = count()
        self._past: list[list[Row]] = [[]]
        self._table = {
            self.open: 5, self.full_hit: 2, self.decode: 14, self.prefill: 6, self.fork: 2,
            self.rollback: 3, self.abort: 3, self.close: 4, self.pin: 1, self.evict: 1,
            self.flush: 0.1,
        }  # fmt: skip

    def run(self, operations: int) -> None:
        """The next `operations` operations."""
        moves = self.random.choices(list(self._table), list(self._table.values()), k=operations)
        for move in moves:
            with self._refusable():
                move()
            self.done[move.__name__] += 1
            self._retire()

    def end(self) -> None:
        """Compare every live state with its oracle; then nothing may be left."""
        for owner in list(self.field.owners):
            owner.check()
            self.field.close(owner)
        for number in range(next(self._names)):  # pins of branches that a full pool ended
            self.field.store.release_owner(f"o{number}")
        self.field.store.flush()
        self.field.after()
        free, live, free_bases, live_bases = self.field.ledger
        assert (live, live_bases) == (0, 0), f"{live} pages and {live_bases} bases leaked"
        assert free == self.field.backend.pages - 1 and free_bases == self.field.backend.bases - 1

    # operations

    def open(self) -> None:
        """A context that shares a random prefix with an earlier one."""
        past = self.random.choice(self._past[-20:])
        self._open([*past[: self.random.randint(0, len(past))], *self._items(2 * C)])

    def full_hit(self) -> None:
        """A prompt that is known as a whole, or up to its last token."""
        context = self.random.choice(self._past[-20:])
        before = self.field.hits
        self._open(context)
        self.done["whole prompts hit"] += bool(context) and self.field.hits - before == len(context)

    def decode(self) -> None:
        """One token for several owners."""
        owners = self._some_owners()
        batch = [(owner, self._items(1)) for owner in owners]
        rows = self.random.sample(range(len(batch)), len(batch))
        left, right = self.random.choice(((0, 0), (0, 3), (2, 0)))
        if batch:
            self.field.feed(*batch, rows=rows, left=left, right=right)
        self._remember(owners)

    def prefill(self) -> None:
        """Many tokens for some owners, one for others."""
        owners = self._some_owners(2)
        batch = [(owner, self._items(self.random.choice((1, C, 3 * C + 1)))) for owner in owners]
        if batch:
            self.field.feed(*batch)
        self._remember(owners)

    def fork(self) -> None:
        """A second branch of a live one."""
        for owner in self._some_owners(1):
            owner.fork(f"o{next(self._names)}")

    def rollback(self) -> None:
        """A live branch at an earlier point."""
        for owner in self._some_owners(1):
            owner.rollback(self.random.randint(0, len(owner.context)))

    def abort(self) -> None:
        """Clients that go away while a forward pass of theirs is planned, run or written."""
        owners = self._some_owners()
        batch = [(owner, self._items(self.random.choice((1, 2 * C + 1)))) for owner in owners]
        if not batch:
            return
        candidates = self.field.plan(*batch)
        stage = self.random.choice(("planned", "run", "written"))
        if stage != "planned":
            plan, _ = self.field.forward_rows(candidates, batch)
        if stage == "written":
            self.field.backend.finish_step(plan)
        for index, (owner, candidate) in enumerate(zip(owners, candidates, strict=True)):
            if stage == "written":
                for page in plan.written_pages(index):
                    candidate.mark_written(page)
            elif self.random.random() < 0.5:
                self.field.store.drop(candidate)
                continue
            self.field.close(owner)
        self.done[f"aborted when {stage}"] += 1
        self.field.after()

    def close(self) -> None:
        """The end of a branch."""
        for owner in self._some_owners(1):
            owner.check()
            self.field.close(owner, keep_tail=self.random.random() < 0.7)

    def pin(self) -> None:
        """A point that is kept by name until its owner ends."""
        for owner in self._some_owners(1):
            self.field.store.pin(owner.state.owner, self.random.choice("xy"), owner.state)
        self.field.after()

    def evict(self) -> None:
        """Pressure on the pool."""
        self.field.store.ensure_pages(self.random.randint(1, self.field.backend.pages))
        self.field.after()

    def flush(self) -> None:
        """Every memo goes."""
        self.field.store.flush()
        self.field.after()

    # helpers

    def _open(self, context: list[Row]) -> None:
        self._past.append(list(context))
        owner = self.field.open(f"o{next(self._names)}", context[:LONGEST])
        owner.check()

    def _items(self, most: int) -> list[Row]:
        mode: Effect = self.random.choice((READ, WRITE, WRITE, WRITE))
        return [
            (self.random.choice(TOKENS), mode if self.random.random() < 0.9 else WRITE)
            for _ in range(self.random.randint(1, most))
        ]

    def _some_owners(self, most: int = 4) -> list[Owner]:
        live = self.field.owners
        return self.random.sample(live, min(len(live), self.random.randint(1, most)))

    def _remember(self, owners: list[Owner]) -> None:
        self._past += [list(owner.context) for owner in owners]
        del self._past[:-40]

    def _retire(self) -> None:
        """Long contexts and too many owners make way."""
        for owner in list(self.field.owners):
            if len(owner.context) > LONGEST or len(self.field.owners) > MOST_OWNERS:
                self.field.close(owner)

    @contextmanager
    def _refusable(self) -> Iterator[None]:
        """A full pool refuses by type, and nothing is lost by it."""
        try:
            yield
        except StateCapacity as error:
            assert "can be had" in str(error), error
            self.done["refused"] += 1
            self.field.after()
