"""Owners on the real store and the real in-place backend, each with an eager oracle beside it.

After every operation `Field.after` audits the ledger and fills with NaN whatever nobody may read:
both dummies, free pages and bases, and the unwritten rows of open pages. Rows of padding are NaN
on their way in. So a marker that reaches an answer or a state fails the next comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_rwttt.core.candidate import Candidate
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.versions import Tail, Version
from tests.assert_close import assert_close
from tests.backends.in_place_rig import Rig, some_tokens
from tests.backends.oracle import InPlaceOracle

READ, WRITE = Effect.READ, Effect.WRITE
C = 4
LENGTHS = (0, 1, C - 1, C, C + 1, 2 * C - 1, 2 * C, 2 * C + 1)
TOLERANCE = 2e-5  # root mean square of a float32 sum in another order, relative
COARSE = 3e-2  # the same with bfloat16 pages

Row = tuple[int, Effect]


class Field(Rig):
    """The rig of the backend's tests at toy size, with owners, markers and audits."""

    def __init__(self, pages: int = 40, bases: int = 6, fold_pages: int = 0, **sizes: Any) -> None:
        super().__init__(
            chunk=C, fold_pages=fold_pages, pages=pages, bases=bases,
            **{"d_model": 16, "d_ff": 32, **sizes},
        )  # fmt: skip
        self.owners: list[Owner] = []
        self.padding = torch.nan
        self.tolerance = TOLERANCE if self.backend.dtype is torch.float32 else COARSE
        self.hits = 0  # tokens that were not run because their state was retained
        self.after()

    # audits

    @property
    def ledger(self) -> tuple[int, int, int, int]:
        """(free pages, live pages, free bases, live bases), after the audit."""
        self.store.check_integrity()
        pages, bases = self.store._pages, self.store._bases
        return pages.available, pages.live, bases.available, bases.live

    def after(self) -> None:
        """What follows every operation: the audit, and NaN wherever nobody may read."""
        self.store.check_integrity()
        pages, bases = self.store._pages, self.store._bases
        rows = [
            row
            for page in range(pages.total)
            if not pages.is_live(page)
            for row in range(page * C, page * C + C)
        ]
        for tail in self.tails():
            rows += range(tail.page * C + tail.rows, (tail.page + 1) * C)
        index = torch.tensor(rows)
        self.backend.H.index_fill_(1, index, torch.nan)
        self.backend.V.index_fill_(1, index, torch.nan)
        dead = [base for base in range(bases.total) if not bases.is_live(base)]
        self.backend.D.index_fill_(1, torch.tensor(dead), torch.nan)

    def tails(self) -> set[Tail]:
        """Open pages that no forward pass is filling."""
        versions = self.store._index.versions.values()
        busy = {o.state.tail for o in self.owners if o.state.candidate is not None}
        memos = {memo.tail for version in versions for memo in version.memos}
        return (memos | {o.state.tail for o in self.owners if o.state.tail}) - busy

    def content(self, version: Version) -> dict[str, Tensor]:
        """A bitwise copy of what a version holds."""
        return self.backend.export(version)

    # owners

    def open(
        self,
        name: str,
        context: Sequence[Row] = (),
        root: Version | None = None,
        limit: int | None = None,
    ) -> Owner:
        """A branch at the deepest retained point of `context`; the rest of it is run."""
        root = root or self.store.root("", self.root)
        tokens, modes = unzip(context)
        limit = len(tokens) if limit is None else limit
        match = self.store.match(root.id, tokens, modes, limit)
        state = self.store.create(name, "b", match, root.id, tokens, modes)
        owner = Owner(self, state, context[: match.depth], root)
        self.hits += match.depth
        self.owners.append(owner)
        self.after()
        owner.feed(context[match.depth :])
        return owner

    def feed(
        self,
        *writes: tuple[Owner, Sequence[Row]],
        rows: Sequence[int] | None = None,
        left: int = 0,
        right: int = 0,
    ) -> list[Tensor]:
        """One forward pass of several owners; `left`, `right`: rows of padding around the batch.

        Compares what each one read with its oracle; returns the deltas [L, n, d].
        """
        candidates = self.plan(*writes, rows=rows, left=left)
        return self.finish(candidates, *writes, left=left, right=right)

    def plan(
        self, *writes: tuple[Owner, Sequence[Row]], rows: Sequence[int] | None = None, left: int = 0
    ) -> list[Candidate]:
        """Candidates of one forward pass; `rows` is the order of the owners in it."""
        planned: dict[int, Candidate] = {}
        at = left
        for index in range(len(writes)) if rows is None else rows:
            owner, new = writes[index]
            _, modes = unzip([*owner.context, *new])
            tokens = [token for token, _ in new]
            try:
                planned[index] = self.store.begin_write(owner.state, tokens, modes, at)
            except BaseException:
                for candidate in planned.values():
                    self.store.drop(candidate)
                raise
            at += len(new)
        return [planned[index] for index in range(len(writes))]

    def finish(
        self,
        candidates: Sequence[Candidate],
        *writes: tuple[Owner, Sequence[Row]],
        left: int = 0,
        right: int = 0,
    ) -> list[Tensor]:
        """Run the forward pass of planned candidates and commit it."""
        plan, deltas = self.forward_rows(candidates, writes, left, right)
        good = self.backend.finish_step(plan)
        assert all(good)
        self.settle(plan, good, candidates)
        for (owner, new), delta in zip(writes, deltas, strict=True):
            owner.took(new, delta)
        self.after()
        return deltas

    def forward_rows(
        self,
        candidates: Sequence[Candidate],
        writes: Sequence[tuple[Owner, Sequence[Row]]],
        left: int = 0,
        right: int = 0,
    ) -> tuple[Any, list[Tensor]]:
        """All layers of one forward pass: its plan, and the deltas of each owner."""
        segments = [candidate.segment for candidate in candidates]
        count = left + sum(segment.count for segment in segments) + right
        plan, outs = self.backend.begin_step(segments), []
        for slot in range(len(self.config.layers)):
            h = torch.full((count, self.config.d_ff), self.padding)
            t = torch.full((count, self.config.d_model), self.padding)
            for segment, (_, new) in zip(segments, writes, strict=True):
                ids = [token for token, _ in new]
                here = slice(segment.start, segment.start + segment.count)
                h[here], t[here] = self.h[slot, ids], self.t[slot, ids]
            out = self.backend.layer_step(plan, slot, h, t)
            assert not out[:left].any() and not out[count - right :].any(), "padding got a delta"
            outs.append(out)
        stacked = torch.stack(outs)
        return plan, [stacked[:, s.start : s.start + s.count] for s in segments]

    def close(self, owner: Owner, keep_tail: bool = True) -> None:
        """End a branch and whatever its owner keeps."""
        self.owners.remove(owner)
        self.store.release(owner.state, keep_tail)
        self.store.release_owner(owner.state.owner)
        self.after()


class Owner:
    """One live branch, the context that it consumed, and its oracle."""

    def __init__(
        self, field: Field, state: OwnerState, context: Sequence[Row], root: Version
    ) -> None:
        self.field, self.state, self.root = field, state, root
        self.context: list[Row] = []
        self.oracles = field.oracles()
        if root.number:
            for slot, oracle in enumerate(self.oracles):
                oracle.W = field.backend.dense(root, slot)
        self._expect(context)
        self.context = list(context)

    def feed(self, new: Sequence[Row], piece: int | None = None) -> None:
        """Run `new` alone, `piece` tokens per forward pass."""
        step = piece or max(1, len(new))
        for first in range(0, len(new), step):
            self.field.feed((self, new[first : first + step]))

    def took(self, new: Sequence[Row], delta: Tensor) -> None:
        """Compare the answers to `new` with the oracle's, which takes them too."""
        assert_close(delta, self._expect(new), self.field.tolerance, f"{self.state!r}")
        self.context += new

    def _expect(self, new: Sequence[Row]) -> Tensor:
        field = self.field
        out = torch.zeros(len(self.oracles), len(new), field.config.d_model)
        for slot, oracle in enumerate(self.oracles):
            for i, (token, mode) in enumerate(new):
                row = field.h[slot, token], field.t[slot, token]
                out[slot, i] = oracle.step(*row, mode is WRITE)
        return out

    def check(self) -> None:
        """The state equals the oracle's: weights, open chunk, position and version number."""
        view, backend = self.field.store.view(self.state), self.field.backend
        rows = [mode for _, mode in self.context].count(WRITE)
        assert (view.position, view.rows) == (len(self.context), rows % C)
        assert view.number == self.root.number + rows // C
        assert (view.tail_page is None) == (view.rows == 0)
        for slot, oracle in enumerate(self.oracles):
            assert_close(
                backend.dense(view, slot), oracle.W, self.field.tolerance, f"weights of {slot}"
            )
            if view.tail_page is not None:
                h, t = backend.tail(view.tail_page, view.rows, slot)
                assert torch.equal(h, torch.stack(oracle.h_rows))
                assert torch.equal(t, torch.stack(oracle.t_rows))

    def fork(self, name: str, branch: str = "b") -> Owner:
        """A second branch at this point."""
        field = self.field
        twin = copy.copy(self)
        twin.state = field.store.fork(self.state, name, branch)
        twin.context = list(self.context)
        twin.oracles = [clone(oracle) for oracle in self.oracles]
        field.owners.append(twin)
        field.after()
        return twin

    def rollback(self, length: int) -> Owner:
        """The branch at an earlier point of its context, as the server does it: end, match, run."""
        name = self.state.owner
        self.field.owners.remove(self)
        self.field.store.release(self.state)
        self.field.after()
        return self.field.open(name, self.context[:length], self.root)

    @property
    def fields(self) -> dict[str, Any]:
        """Every field of the record and of its clock that a rollback must restore."""
        clock, version = self.state.clock, self.state.version
        found = {f"clock.{k}": copy.copy(getattr(clock, k)) for k in type(clock).__slots__}
        found["clock.state_id"] = clock.state_id
        found |= {k: getattr(self.state, k) for k in ("owner", "branch", "failed", "released")}
        return found | {"version": (version.id, version.number), "rows": self.tail_rows}

    @property
    def tail_rows(self) -> list[list[float]]:
        """The open chunk's rows of layer 0."""
        tail = self.state.tail
        if tail is None:
            return []
        return self.field.backend.tail(tail.page, tail.rows, 0)[0].tolist()


def clone(oracle: InPlaceOracle) -> InPlaceOracle:
    """An oracle that goes its own way from here."""
    twin = copy.copy(oracle)
    twin.h_rows, twin.t_rows = list(oracle.h_rows), list(oracle.t_rows)
    return twin


def writes(*tokens: int) -> list[Row]:
    """Tokens in write mode."""
    return [(token, WRITE) for token in tokens]


def prompt(count: int, seed: int = 0) -> list[Row]:
    """`count` write-mode tokens."""
    return writes(*some_tokens(count, seed))


def mixed(count: int, seed: int = 0) -> list[Row]:
    """`count` tokens, every fifth of them in read mode."""
    return [(t, READ if i % 5 == 3 else WRITE) for i, t in enumerate(some_tokens(count, seed))]


def unzip(context: Sequence[Row]) -> tuple[list[int], ModeSpans]:
    """(tokens, modes) of a context."""
    modes = ModeSpans()
    for _, mode in context:
        modes.append(1, mode)
    return [token for token, _ in context], modes
