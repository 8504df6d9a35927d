"""Rounds of decode: the planner's legal groups become forward passes of the running batch.

One round gives every running request at most one token. In mode ``rw`` a round is one forward
pass of everybody whom the planner issues; in ``phase`` and ``serial`` it is one forward pass per
legal group, so READ-only and boundary requests (or single owners) run apart. A request that is held
back or waits for its group stays in the running batch, where abort, retraction and admission see
it; only the forward pass is of a part (``part_of``).
"""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

import torch

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import StateError
from sgl_rwttt.core.planner import BatchPlanner, Round, Transition

from .lineage import RequestLineage
from .options import TTTOptions
from .runtime import TTTRuntime

STATELESS = "off"  # backend name in the phase key of a request that owns no state


class DecodeRounds:
    """Which rows of the running batch the next forward pass takes."""

    def __init__(self, runtime: TTTRuntime, options: TTTOptions) -> None:
        target = 1 if options.mode == "serial" else options.target_batch
        self.runtime = runtime
        self.mode = options.mode
        self.planner = BatchPlanner(target, options.wait_budget)
        self.counters = {"rounds": 0, "forwards": 0, "rows": 0, "held": 0, "max_wait": 0}
        self._due: deque[set[str]] = deque()  # request ids of the round's groups still to run

    def report(self) -> dict[str, Any]:
        """Mode, limits and counters, plain values; waits in decode rounds."""
        return {
            "mode": self.mode,
            "target_batch": self.planner.target_batch,
            "wait_budget": self.planner.wait_budget,
            **self.counters,
        }

    def take(self, reqs: list[Any], *, whole: bool) -> list[int] | None:
        """Indices of ``reqs`` that run now, None for all of them; never empty.

        ``whole``: the batch cannot be divided (penalties share one object), so nobody waits.
        """
        keep = self._rows(reqs, whole)
        self.counters["forwards"] += 1
        self.counters["rows"] += len(reqs if keep is None else keep)
        return keep

    def _rows(self, reqs: list[Any], whole: bool) -> list[int] | None:
        """The next group's rows, of a new round if the last one's have all run."""
        if self.mode == "rw":
            issued = set().union(*self._issued(self._round(reqs, hold=not whole)))
            return _indices(reqs, issued)
        while True:
            if not self._due:
                groups = self._issued(self._round(reqs, hold=True))
                self._due.extend(groups or [set()])  # none: everybody is leaving
            keep = _indices(reqs, self._due.popleft())
            if keep is None or keep:
                return keep

    def _round(self, reqs: list[Any], *, hold: bool) -> Round:
        """Plan one round; an owner that breaks a rule fails alone and the others are planned."""
        self.counters["rounds"] += 1
        while True:
            ready = [_transition(self.runtime, req) for req in reqs if not _is_leaving(req)]
            try:
                return self.planner.plan(ready, self._committed, hold=hold)
            except StateError as error:
                self._fail(reqs, error)

    def _fail(self, reqs: list[Any], error: StateError) -> None:
        broken = [req for req in reqs if not _is_leaving(req) and req.rid == error.branch]
        if not broken:
            raise error
        for req in broken:
            self.runtime.fail(req.ttt, error)

    def _issued(self, planned: Round) -> list[set[str]]:
        """Request ids of each group of the round."""
        self.counters["held"] += len(planned.held)
        for group in planned.groups:
            for wait in group.waits if group.key.effect is Effect.WRITE else ():
                self.counters["max_wait"] = max(self.counters["max_wait"], wait)
                self.runtime.metrics.wait(wait)
        return [{t.branch for t in group.transitions} for group in planned.groups]

    def _committed(self, owner: str, branch: str) -> int:
        state = self.runtime.store.owner_state(owner, branch)
        return 0 if state is None else state.version.number


def _is_leaving(req: Any) -> bool:
    """Whether the request ends with its next forward pass: aborted, or its owner failed."""
    lineage: RequestLineage | None = getattr(req, "ttt", None)
    return req.to_finish is not None or (lineage is not None and lineage.state is None)


def _indices(reqs: list[Any], issued: set[str]) -> list[int] | None:
    """Indices of the ``issued`` requests and of those that are leaving; None for all."""
    keep = [i for i, req in enumerate(reqs) if req.rid in issued or _is_leaving(req)]
    return None if len(keep) == len(reqs) else keep


def _transition(runtime: TTTRuntime, req: Any) -> Transition:
    lineage: RequestLineage | None = getattr(req, "ttt", None)
    if lineage is None:
        return Transition(req.rid, req.rid, STATELESS, (), Effect.READ, 0)
    return runtime.transition(lineage, lineage.next_effect())


def part_of(batch: Any, keep: list[int]) -> Any:
    """A batch of the rows ``keep`` of ``batch``, prepared for decode; ``batch`` itself stays whole.

    The rows that stay behind keep their place; the lengths of the others are advanced in both.
    """
    part = copy.copy(batch)
    part.sampling_info = copy.copy(batch.sampling_info)
    part.filter_batch(keep_indices=keep)
    part.prepare_for_decode()
    rows = torch.tensor(keep)
    for field in ("seq_lens", "seq_lens_cpu", "orig_seq_lens"):
        lengths = getattr(batch, field).clone()
        lengths[rows] += 1
        setattr(batch, field, lengths)
    batch.seq_lens_sum = None
    batch.input_ids = None  # each row's next token lies in SGLang's buffer, by request pool row
    batch.forward_mode = part.forward_mode
    return part
