"""One forward pass over owned, writable state: the life of a step, top to bottom.

``begin``: each row of the batch finds its owner, the store plans its tokens (which pages they
read, which rows they append, which blocks they complete), the planner checks that the group is
legal. The layers then call ``TTTStep.layer`` through their hooks. ``finish``: the WRITE group runs,
and each owner is committed or dropped alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sgl_rwttt.core.candidate import Candidate
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import StaleVersion, WriteFailed
from sgl_rwttt.core.faults import reach
from sgl_rwttt.core.planner import group_transitions

from .lineage import RequestLineage
from .runtime import TTTRuntime

logger = logging.getLogger(__name__)


class TTTStep:
    """The owners, candidates and read plan of the forward pass that is running."""

    def __init__(
        self, runtime: TTTRuntime, owners: list[tuple[RequestLineage, Candidate]], target: Any
    ) -> None:
        self.runtime = runtime
        self.owners = owners
        self.plan = runtime.backend.begin_step([c.segment for _, c in owners])
        self._embeddings: torch.Tensor | None = target

    def layer(self, slot: int, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The state's part of one TTT layer's output for every row: [rows, d], float32.

        ``h`` [rows, d_ff] is the down projection's input, ``x`` [rows, d] the MLP's input.
        """
        target = x if self._embeddings is None else self._embeddings
        return self.runtime.backend.layer_step(self.plan, slot, h, target)

    def finish(self) -> None:
        """Run the WRITE group, then commit each owner or drop its candidate; each fails alone."""
        self._check_writes()
        written = []
        results = self._write()
        self.runtime.counters["retried_writes"] += self.plan.retried
        for index, (lineage, candidate) in enumerate(self.owners):
            if not results[index]:
                reason = self.plan.failed.get(index, "not finite")
                error = WriteFailed(
                    f"the update of this owner's state failed ({reason}); version and tail are kept"
                )
                self._drop_failed(lineage, candidate, error)
                continue
            for page in self.plan.written_pages(index):
                candidate.mark_written(page)
            written.append((lineage, candidate))
        for lineage, candidate in written:
            try:
                self._commit(lineage, candidate)
            except RuntimeError as error:
                self._drop_failed(lineage, candidate, error)

    def _commit(self, lineage: RequestLineage, candidate: Candidate) -> None:
        read, state = lineage.version_read(candidate), lineage.require_state()
        names = {"owner": lineage.owner, "branch": lineage.branch}
        if candidate.blocks:
            reach("boundary_before_commit", **names)
        self.runtime.committed(lineage, self.runtime.store.commit(candidate))
        lineage.note_output(read)
        if candidate.blocks:
            reach("after_commit", **names)
        if state.clock.position < lineage.prompt:
            reach("mid_prefill", **names)
        elif state.clock.rows:
            reach("mid_tail", **names)

    def drop(self) -> None:
        """Drop every candidate (the forward pass raised): nobody advances."""
        for _, candidate in self.owners:
            self.runtime.store.drop(candidate)

    def _check_writes(self) -> None:
        """The WRITE group must be legal: equal keys, committed versions, no owner twice."""
        writing = [
            self.runtime.transition(lineage, Effect.WRITE)
            for lineage, candidate in self.owners
            if candidate.segment.blocks
        ]
        groups = group_transitions(writing, self.runtime.committed_version)
        self.runtime.metrics.group(Effect.READ, len(self.owners))
        for group in groups:
            self.runtime.metrics.group(Effect.WRITE, len(group.transitions))

    def _write(self) -> list[bool]:
        """BoundaryUpdate over the group; per owner, whether its candidate may be committed."""
        try:
            return self.runtime.backend.finish_step(self.plan)
        except BaseException:
            for _, candidate in self.owners:  # open pages may hold half of a write
                if any(block.in_place for block in candidate.blocks):
                    candidate.state.failed = True
            raise

    def _drop_failed(
        self, lineage: RequestLineage, candidate: Candidate, error: RuntimeError
    ) -> None:
        self.runtime.store.drop(candidate)
        self.runtime.fail(lineage, lineage.typed(error))


def _rows(forward_batch: Any) -> Iterator[tuple[str, int, int, int]]:
    """(request id, first row, row count, context position) of each request of the batch.

    Known on the host: nothing waits for the device here.
    """
    if forward_batch.forward_mode.is_decode():
        lengths = forward_batch.seq_lens_cpu.tolist()
        for i, rid in enumerate(forward_batch.rids):
            yield rid, i, 1, lengths[i] - 1
        return
    start = 0
    counts, prefixes = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
    for rid, count, prefix in zip(forward_batch.rids, counts, prefixes, strict=True):
        yield rid, start, int(count), int(prefix)
        start += int(count)


def plan_owners(runtime: TTTRuntime, forward_batch: Any) -> list[tuple[RequestLineage, Candidate]]:
    """Begin a write for every owned row; an owner whose pages cannot be had fails alone.

    So does one that is not where its row says it is.
    """
    owners: list[tuple[RequestLineage, Candidate]] = []
    for rid, start, count, position in _rows(forward_batch):
        lineage = runtime.by_rid.get(rid)
        if lineage is None or lineage.state is None or lineage.error is not None:
            continue
        try:
            _check_position(lineage.state.clock.position, position)
            candidate = runtime.store.begin_write(
                lineage.state,
                lineage.tokens(position, position + count),
                lineage.extend_to(position + count),
                start,
            )
        except RuntimeError as error:
            runtime.fail(lineage, lineage.typed(error))
            continue
        owners.append((lineage, candidate))
    return owners


def _check_position(owner: int, row: int) -> None:
    if owner != row:
        raise StaleVersion(f"the owner is at position {owner}, its row at {row}")


@contextmanager
def forward_step(
    runtime: TTTRuntime, input_ids: torch.Tensor, forward_batch: Any, embed: Any
) -> Iterator[TTTStep | None]:
    """Plan on entry, publish on a clean exit, drop everything when the forward pass raised.

    ``embed`` maps token ids to embeddings and is called only for ``ttt_target: input_embed``; None
    for a rule without targets.
    Yields None when no row of the batch has an owner.
    """
    idle = forward_batch.forward_mode.is_idle()
    owners = [] if idle else plan_owners(runtime, forward_batch)
    if not owners:
        yield None
        return
    target = None
    if embed is not None and runtime.config.target == "input_embed":
        target = embed(input_ids)
    step = TTTStep(runtime, owners, target)
    try:
        yield step
        step.finish()
    except BaseException:
        step.drop()
        raise
