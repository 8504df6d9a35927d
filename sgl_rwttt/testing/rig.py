"""A backend behind the real store, driven as a server drives it, with NaN in all free memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.backends.base import StateBackend
from sgl_rwttt.core.candidate import Candidate
from sgl_rwttt.core.lineage import root_id
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.slots import SlotPool
from sgl_rwttt.core.store import TTTStateStore
from sgl_rwttt.testing.case import Batch, Case, Item, Plan, Rows, SlotKind
from sgl_rwttt.testing.memory import (
    Memory,
    PoisonedPool,
    Reading,
    Slot,
    as_bytes,
    names,
    row_errors,
    split,
)


@dataclass
class Branch:
    """A running branch, what it has read, and what it was answered."""

    state: OwnerState
    items: list[Item]
    answers: list[tuple[int, Tensor]] = field(default_factory=list)  # (position, rows from there)


Write = tuple[Branch, Sequence[Item]]


class Step(NamedTuple):
    """One forward that is open."""

    writes: Sequence[Write]
    candidates: list[Candidate]
    batch: Batch


class Rig:
    """A fresh backend of a case, and a store. ``rule`` starts the message of every failure."""

    def __init__(self, case: Case, rule: str, pages: int = 48, bases: int = 12) -> None:
        self.case, self.rule = case, rule
        self.backend: StateBackend[Any] = case.make(pages, bases)
        self.pages = PoisonedPool(pages, "page", partial(case.poison, self.backend, "page"))
        self.bases = PoisonedPool(bases, "base", partial(case.poison, self.backend, "base"))
        self.root = root_id("conformance", self.backend.name)
        self.store = TTTStateStore(
            self.pages,
            self.bases,
            case.chunk,
            case.fold_pages,
            self.root,
            self.backend.copy_rows,
            case.evidence,
        )
        self._oracle: dict[tuple[Item, ...], Tensor] = {}
        self._names = 0

    def require(self, condition: bool, broken: str) -> None:
        """Raise AssertionError naming the rule, and what broke it, unless ``condition``."""
        if not condition:
            raise AssertionError(f"{self.rule}: {broken}")

    # branches

    def start(self, items: Sequence[Item] = ()) -> Branch:
        """A branch at the deepest retained point of ``items``."""
        tokens, modes = split(items)
        match = self.store.match(self.root, tokens, modes, len(tokens))
        state = self.store.create(self._name(), "b", match, self.root, tokens, modes)
        return Branch(state, list(items[: match.depth]))

    def fork(self, branch: Branch) -> Branch:
        """A second branch at the same point."""
        return Branch(self.store.fork(branch.state, self._name(), "b"), list(branch.items))

    def end(self, *branches: Branch) -> None:
        """Release branches and forget what they left."""
        for branch in branches:
            self.store.release(branch.state, keep_tail=False)
        self.store.flush()

    def _name(self) -> str:
        self._names += 1
        return f"o{self._names}"

    # forwards

    def step(self, *writes: Write, order: Sequence[int] | None = None, gap: int = 0) -> list[bool]:
        """One forward of several branches; per branch, whether it was committed."""
        step = self.begin(*writes, order=order, gap=gap)
        plan, out = self.forward(step)
        return self.settle(step, plan, out)

    def advance(self, *writes: Write, order: Sequence[int] | None = None, gap: int = 0) -> None:
        """As ``step``, and everybody has to be committed."""
        good = self.step(*writes, order=order, gap=gap)
        self.require(all(good), f"finish_step refused sound writes: {good}")

    def begin(self, *writes: Write, order: Sequence[int] | None = None, gap: int = 0) -> Step:
        """Plan a forward: branches in the ``order`` of the batch, ``gap`` foreign rows between."""
        candidates, starts, at = [], {}, gap
        for index in range(len(writes)) if order is None else order:
            starts[index] = at
            at += len(writes[index][1]) + gap
        rows = []
        for index, (branch, items) in enumerate(writes):
            tokens, _ = split(items)
            _, modes = split([*branch.items, *items])
            candidates.append(self.store.begin_write(branch.state, tokens, modes, starts[index]))
            rows.append(Rows(starts[index], tuple(items), tuple(branch.items)))
        return Step(writes, candidates, Batch(at, tuple(rows)))

    def forward(self, step: Step) -> tuple[Plan, Tensor]:
        """The layers of a forward: the plan, which is not finished, and the outputs [N, ...]."""
        plan: Plan = self.backend.begin_step([c.segment for c in step.candidates])
        with torch.no_grad():
            out = self.case.forward(self.backend, plan, step.batch)
        rows = step.batch.size
        self.require(len(out) == rows, f"forward answered {len(out)} rows of {rows}")
        return plan, out

    def settle(self, step: Step, plan: Plan, out: Tensor) -> list[bool]:
        """Finish a forward: commit what was written, drop the rest, and audit the store."""
        good = self.finish(step, plan)
        self.publish(step, plan, out, good)
        return good

    def finish(self, step: Step, plan: Plan) -> list[bool]:
        """The deferred writes; per branch, whether its candidate may be committed."""
        good = self.backend.finish_step(plan)
        count = len(step.writes)
        self.require(len(good) == count, f"finish_step judged {len(good)} of {count}")
        return good

    def publish(self, step: Step, plan: Plan, out: Tensor, good: Sequence[bool]) -> None:
        """Commit or drop each candidate, and audit the store."""
        for index, ((branch, items), candidate) in enumerate(
            zip(step.writes, step.candidates, strict=True)
        ):
            if not good[index]:
                self.store.drop(candidate)
                continue
            kept = plan.unchanged_pages(index)
            for page in plan.written_pages(index):
                candidate.mark_written(page, changed=page not in kept)
            missing = candidate.unwritten
            self.require(not missing, f"a sound write, but written_pages lacks pages {missing}")
            self.store.commit(candidate)
            start = step.batch.rows[index].start
            branch.answers.append((len(branch.items), out[start : start + len(items)].clone()))
            branch.items += items
        self.store.check_integrity()

    def drop(self, step: Step) -> None:
        """End a forward as when a layer raised: nobody advances."""
        for candidate in step.candidates:
            self.store.drop(candidate)
        self.store.check_integrity()

    # comparisons

    def compare(self, branch: Branch, where: str = "") -> None:
        """Require that all answers of a branch are the oracle's."""
        key = tuple(branch.items)
        if key not in self._oracle:
            tokens = [token for token, _ in key]
            self._oracle[key] = self.case.oracle(tokens, [mode for _, mode in key])
        expected = self._oracle[key]
        scale = expected.double().square().mean().sqrt()
        self.require(bool(scale > 0), "the oracle answers nothing but zeros")
        for first, rows in branch.answers:
            error = row_errors(rows, expected[first : first + len(rows)]) / scale
            worst = int(error.argmax())
            self.require(
                bool((error <= self.case.tolerance).all()),  # False for NaN
                f"{where or 'the answer'}: position {first + worst} is off by {error[worst]:.2g} "
                f"of the oracle's RMS (allowed {self.case.tolerance:.2g})",
            )

    def memory(self) -> Memory:
        """The bytes of every slot but the dummies, in the backend's own words (``export``)."""
        found: Memory = {}
        for page in range(1, self.pages.total):
            found["page", page] = as_bytes(self.slot("page", page))
        for base in range(1, self.bases.total) if self.case.fold_pages else ():
            found["base", base] = as_bytes(self.slot("base", base))
        return found

    def slot(self, kind: SlotKind, slot: int) -> dict[str, Tensor]:
        """All numbers of one slot."""
        if kind == "base":
            return self.backend.export(Reading(slot, ()))
        tensors = self.backend.export(Reading(None, (slot,)))
        rows = self.case.chunk - 1
        tail = self.backend.export_tail(slot, rows) if self.case.evidence == "rows" else {}
        return {**tensors, **tail}

    def owned(self, branch: Branch) -> bytes:
        """The bytes of a branch's version and open tail."""
        state = branch.state
        tail = {} if state.tail is None else self.tail(branch)
        return as_bytes(self.backend.export(state.version)) + as_bytes(tail)

    def tail(self, branch: Branch) -> dict[str, Tensor]:
        """The open tail's evidence."""
        tail = branch.state.tail
        return {} if tail is None else self.backend.export_tail(tail.page, tail.rows)

    def check_unchanged(self, before: Memory, allowed: set[Slot], by: str) -> None:
        """Require that no slot but ``allowed`` has other bytes than before."""
        after = self.memory()
        changed = {slot for slot in before if before[slot] != after[slot]} - allowed
        self.require(not changed, f"{by} changed {names(changed)}")

    def check_free(self) -> None:
        """Require that all free memory holds NaN only."""
        pools: list[tuple[SlotKind, SlotPool]] = [("page", self.pages)]
        pools += [("base", self.bases)] if self.case.fold_pages else []
        touched: set[Slot] = set()
        for kind, pool in pools:
            for slot in range(1, pool.total):
                tensors = {} if pool.is_live(slot) else self.slot(kind, slot)
                if not all(bool(each.isnan().all()) for each in tensors.values()):
                    touched.add((kind, slot))
        self.require(not touched, f"free memory was written: {names(touched)}")
