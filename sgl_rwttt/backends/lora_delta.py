"""LoRA deltas (DeltaAdapterState): an adapter per owner, trained on what the owner read.

At each targeted projection ``y = W x + (alpha / r) B (A x)``, with the owner's own A and B and the
base model's W, which everybody shares. After every C write-mode tokens the owner's adapter takes
AdamW steps on those C tokens, read as a sequence of their own from position 0 (``lora_train``);
a segment that the model already predicts well is not learnt from, and the next version then shares
its predecessor's slot. A token that completes a segment is answered with the version before it.
Owners of different ranks may share a batch; READ and WRITE take each rank apart.
Source: TLM, Hu et al. 2025 ("Test-Time Learning for Large Language Models"), in its online form.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.backends.lora_config import LoraDeltaConfig
from sgl_rwttt.backends.lora_decoder import DecoderWeights
from sgl_rwttt.backends.lora_slots import AdapterSlots, initial_adapter
from sgl_rwttt.backends.lora_train import Outcome, boundary_update
from sgl_rwttt.backends.memory import sizes
from sgl_rwttt.core.faults import reach
from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.apply_state.plan import ReadPlan
from sgl_rwttt.kernels.lora_apply.plan import plan_lora

if TYPE_CHECKING:
    from sgl_rwttt.core.segment import Segment

__all__ = ["LoraDeltaBackend", "LoraDeltaConfig", "initial_adapter"]

_log = logging.getLogger(__name__)


class Job(NamedTuple):
    """One owner's boundary."""

    segment: int  # index of its segment
    page: int  # slot that takes the new adapter
    pages: tuple[int, ...]  # what the segment's rows read before the boundary
    tokens: Sequence[int]  # the evidence


@dataclass(slots=True)
class LoraPlan:
    """Built once per forward, used by every layer; not reusable."""

    segments: tuple[Segment, ...]
    reads: dict[int, ReadPlan]  # by index of the rank
    deferred: tuple[Job, ...]  # completed by their segment's last token: written afterwards
    kept: dict[int, tuple[int, ...]]  # page of a boundary without a step -> what is read instead
    written: list[tuple[int, int]]  # (segment, page) of boundaries passed, in order
    failed: dict[int, str] = field(default_factory=dict)  # segment -> why its write failed twice
    retried: int = 0  # boundaries that were computed once more, each alone
    updates: int = 0  # boundaries that changed an adapter
    finished: bool = False

    def written_pages(self, segment: int) -> tuple[int, ...]:
        """Pages of the boundaries that one segment may commit, in order."""
        if segment in self.failed:
            return ()
        return tuple(page for index, page in self.written if index == segment)

    def unchanged_pages(self, segment: int) -> tuple[int, ...]:
        """Those of ``written_pages`` whose version shares its predecessor's slot."""
        return tuple(page for page in self.written_pages(segment) if page in self.kept)


class LoraDeltaBackend(AdapterSlots):
    """The rule's READ and WRITE over its slots; implements ``base.StateBackend``."""

    name = "lora_delta"
    stateless = True

    def __init__(
        self,
        config: LoraDeltaConfig,
        slots: int,
        train_tokens: int,
        device: torch.device | str = "cpu",
        others: Sequence[LoraDeltaConfig] = (),
    ) -> None:
        """Allocate the pools; ``set_weights`` and a ``set_start`` for each rank have to follow.

        ``train_tokens`` bounds the padded tokens of one forward and backward of a WRITE; ``others``
        as in ``AdapterSlots``. Raises ValueError when a segment would not fit.
        """
        super().__init__(config, slots, device, others)
        if train_tokens < config.chunk:
            raise ValueError(
                f"{train_tokens} training tokens at a time do not hold a segment of {config.chunk}"
            )
        self.train_tokens = train_tokens
        self.write_group: int | None = None  # largest BoundaryUpdate batch; None = the step's
        self._weights: DecoderWeights | None = None
        self._read_cache: tuple[tuple[int, ...], dict[int, ReadPlan]] = ((), {})
        self._apply = kernel("lora_apply", self.device.type)

    def report(self) -> dict[str, Any]:
        """Sizes and rule, plain values for a status page."""
        return {
            **sizes(self),
            "layers": list(range(self.config.shape.layers)),
            "targets": list(self.config.targets),
            "ranks": [each.rank for each in self.configs],
            "train_tokens": self.train_tokens,
        }

    def set_weights(self, weights: DecoderWeights) -> None:
        """Take the model's own weights; they are neither copied nor changed."""
        if weights.shape != self.config.shape:
            raise ValueError(f"weights of {weights.shape}, not {self.config.shape}")
        self._weights = weights

    def begin_step(self, segments: Sequence[Segment]) -> LoraPlan:
        """Write the boundaries inside the segments, then plan what each row reads.

        Evidence is token ids, so an inner boundary needs nothing of this forward pass; owners'
        boundaries are batched, an owner's own follow each other. Writes only slots that the
        segments' candidates own. Raises ValueError on segments whose boundaries and evidence do
        not match, RuntimeError while there are no weights.
        """
        if self._weights is None:
            raise RuntimeError("the backend has no weights")
        inner, deferred = self._jobs(segments)
        plan = LoraPlan(tuple(segments), {}, deferred, kept={}, written=[])
        while any(inner):
            self._write(plan, [jobs.pop(0) for jobs in inner if jobs])
            inner = [[job for job in jobs if job.segment not in plan.failed] for jobs in inner]
        for index in plan.failed:  # its rows read what there was before, not an unwritten slot
            blocks = plan.segments[index].blocks
            plan.kept.update({part.page: part.pages for part in blocks})
        slots = tuple(self._row_slots(plan))
        key = (*slots, *(self._form_of[slot] for slot in slots))
        if key != self._read_cache[0]:
            self._read_cache = (key, self._plan_reads(slots))
        plan.reads = self._read_cache[1]
        return plan

    @torch.no_grad()
    def read(self, plan: LoraPlan, layer: int, target: str, x: Tensor) -> Tensor:
        """The state's part of one projection of x [N, d_in]: [N, d_out] float32, zeros for rows of
        no segment.
        """
        A, B = self.pools[target]
        out = torch.zeros(x.shape[0], B.shape[2], device=x.device)
        for form, rows in plan.reads.items():
            rank, scale = self.configs[form].rank, self.configs[form].scale
            self._apply(x.float(), out, rows, A[layer, :, :rank], B[layer, ..., :rank], scale)
        return out

    def finish_step(self, plan: LoraPlan) -> list[bool]:
        """Write the boundaries at the segments' ends; per segment, whether it may be committed.

        False: some boundary of that segment is not finite, or computing it failed twice (in the
        batch, then alone). Raises RuntimeError on a second call.
        """
        if plan.finished:
            raise RuntimeError("cannot finish the step: it ran already")
        plan.finished = True
        self._write(plan, [job for job in plan.deferred if job.segment not in plan.failed])
        return [index not in plan.failed for index in range(len(plan.segments))]

    def _jobs(self, segments: Sequence[Segment]) -> tuple[list[list[Job]], tuple[Job, ...]]:
        """(inner boundaries of each segment in order, those at the segments' ends)."""
        inner: list[list[Job]] = []
        deferred: list[Job] = []
        for index, segment in enumerate(segments):
            blocks = segment.blocks
            if len(blocks) != len(segment.evidence):
                raise ValueError(
                    f"segment {index}: {len(blocks)} boundaries, evidence of "
                    f"{len(segment.evidence)}"
                )
            jobs = [
                Job(index, part.page, part.pages, tokens)
                for part, tokens in zip(blocks, segment.evidence, strict=True)
            ]
            last = blocks[-1].deferred if blocks else False
            deferred += jobs[-1:] if last else []
            inner.append(jobs[:-1] if last else jobs)
        return inner, tuple(deferred)

    def _row_slots(self, plan: LoraPlan) -> Iterator[int]:
        """The slot that each row of the batch reads, up to the last row of a segment."""
        row = 0
        for segment in sorted(plan.segments, key=lambda segment: segment.start):
            yield from (0 for _ in range(segment.start - row))
            for part in segment.parts:
                slot = self._effective(plan, part.pages)
                unread = self.changes_nothing(slot)
                yield from (0 if unread else slot for _ in range(part.count))
            row = segment.start + segment.count

    def _effective(self, plan: LoraPlan, pages: tuple[int, ...]) -> int:
        while pages and pages[-1] in plan.kept:
            pages = plan.kept[pages[-1]]
        return self.slot_of(pages)

    def _plan_reads(self, slots: Sequence[int]) -> dict[int, ReadPlan]:
        """For each rank that occurs, the rows that read an adapter of it."""
        plans = {}
        for form in sorted({self._form_of[slot] for slot in slots if slot}):
            mine = [slot if self._form_of[slot] == form else 0 for slot in slots]
            plans[form] = plan_lora(mine, self.configs[form].rank, self.device)
        return plans

    def _write(self, plan: LoraPlan, jobs: list[Job]) -> None:
        """BoundaryUpdate of different owners in groups, then of each failing one alone."""
        again: list[Job] = []
        raised: RuntimeError | None = None
        for group in self._groups(plan, jobs):
            try:
                again += self._write_group(plan, group)
            except RuntimeError as error:
                raised = error
                again += group
        if again:
            plan.retried += len(again)
            reason = "not finite" if raised is None else repr(raised)
            _log.warning("ttt_write_retried blocks=%d reason=%s", len(again), reason)
        for job in again:
            try:
                if self._write_group(plan, [job]):
                    plan.failed[job.segment] = "not finite"
            except RuntimeError as error:
                plan.failed[job.segment] = repr(error)

    def _groups(self, plan: LoraPlan, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Jobs of one rank each, at most ``write_group`` at a time."""
        by_form: dict[int, list[Job]] = {}
        for job in jobs:
            by_form.setdefault(self._form_of[self._effective(plan, job.pages)], []).append(job)
        size = self.write_group or max(1, len(jobs))
        for same in by_form.values():
            for first in range(0, len(same), size):
                yield same[first : first + size]

    def _write_group(self, plan: LoraPlan, jobs: list[Job]) -> list[Job]:
        """Compute the adapters of ``jobs``, all of one rank, aside and write the finite ones; the
        others returned."""
        assert self._weights is not None
        reach("write.batch", pages=[job.page for job in jobs])
        slots = [self._effective(plan, job.pages) for job in jobs]
        form, before = self._form_of[slots[0]], self.gather(slots)
        segments = [job.tokens for job in jobs]
        after, outcomes = boundary_update(
            self._weights, self.configs[form], before, segments, self.train_tokens
        )
        sound = [outcome.finite for outcome in outcomes]
        good = self._judged(after, jobs, sound)
        changed = [i for i, outcome in enumerate(outcomes) if good[i] and outcome.steps]
        if changed:
            learnt = {name: (A[:, changed], B[:, changed]) for name, (A, B) in after.items()}
            self.put(learnt, [jobs[i].page for i in changed], form)
        self._note(plan, jobs, good, outcomes)
        return [job for job, fine in zip(jobs, good, strict=True) if not fine]

    def _judged(
        self, after: dict[str, tuple[Tensor, Tensor]], jobs: list[Job], sound: list[bool]
    ) -> list[bool]:
        """Whether each result may be published, faults that tests inject included."""
        first = next(iter(after.values()))[1]
        for index, job in enumerate(jobs):
            reach("write.candidate", values=first, index=index, page=job.page)
        finite = first.flatten(2).isfinite().all(-1).all(0).tolist()
        return [a and b for a, b in zip(sound, finite, strict=True)]

    def _note(
        self, plan: LoraPlan, jobs: list[Job], good: list[bool], outcomes: list[Outcome]
    ) -> None:
        for job, fine, outcome in zip(jobs, good, outcomes, strict=True):
            if not fine:
                continue
            plan.written.append((job.segment, job.page))
            if outcome.steps:
                plan.updates += 1
            else:
                plan.kept[job.page] = job.pages
