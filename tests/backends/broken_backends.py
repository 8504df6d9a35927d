"""The toy rule, broken in one way each, and the check of the suite that has to see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.core.segment import Segment
from tests.backends.conformance_cases import toy

RunningMean: Any = toy().RunningMean


class RowsInOrder(RunningMean):
    """Takes the segments' order for that of the batch."""

    def begin_step(self, segments: Sequence[Segment]) -> Any:
        at, moved = 0, []
        for segment in segments:
            moved.append(segment._replace(start=at))
            at += segment.count
        return super().begin_step(moved)


class OneVersion(RunningMean):
    """Answers all rows of a forward with the version at its start."""

    def begin_step(self, segments: Sequence[Segment]) -> Any:
        return super().begin_step(
            [
                s._replace(parts=tuple(p._replace(base=s.base, pages=s.pages) for p in s.parts))
                for s in segments
            ]
        )


class RowShort(RunningMean):
    """Copies a tail without its last row."""

    def copy_rows(self, src: int, dst: int, rows: int) -> None:
        self.rows[:, dst, :rows] = 0
        super().copy_rows(src, dst, rows - 1)


class ReadsAppend(RunningMean):
    """Leaves READ rows in the open page, behind the tail, where the next WRITE overwrites them."""

    def layer_step(self, plan: Any, slot: int, h: None, target: Tensor) -> Tensor:
        for segment in plan.segments:
            for part in segment.parts:
                if not part.writes and part.page:
                    at = segment.start + part.offset
                    self.rows[slot, part.page, part.row, :-1] = target[at]
        return super().layer_step(plan, slot, h, target)


class AllGood(RunningMean):
    """Judges nothing."""

    def finish_step(self, plan: Any) -> list[bool]:
        super().finish_step(plan)
        plan.good = [True] * len(plan.good)
        return plan.good


class AllFail(RunningMean):
    """Fails everybody for one."""

    def finish_step(self, plan: Any) -> list[bool]:
        super().finish_step(plan)
        plan.good = [all(plan.good)] * len(plan.good)
        return plan.good


class Spreading(RunningMean):
    """Adds nothing to every row, or NaN."""

    def layer_step(self, plan: Any, slot: int, h: None, target: Tensor) -> Tensor:
        return super().layer_step(plan, slot, h, target) + 0 * target.sum()


class TailLost(RunningMean):
    """Clears the page of a block that failed."""

    def finish_step(self, plan: Any) -> list[bool]:
        good = super().finish_step(plan)
        for segment, fine in zip(plan.segments, good, strict=True):
            if not fine:
                self.rows[:, [block.page for block in segment.blocks]] = 0
        return good


class NextPage(RunningMean):
    """Prepares the page after the one it writes."""

    def layer_step(self, plan: Any, slot: int, h: None, target: Tensor) -> Tensor:
        for segment in plan.segments:
            self.rows[:, segment.parts[-1].page + 1] = 0
        return super().layer_step(plan, slot, h, target)


class Reporting(RunningMean):
    """Reports a tensor."""

    def report(self) -> dict[str, Any]:
        return super().report() | {"mean": torch.zeros(1)}


class Drifting(RunningMean):
    """Rescales committed pages, by less than any tolerance."""

    def finish_step(self, plan: Any) -> list[bool]:
        for segment in plan.segments:
            self.rows[:, list(segment.pages)] *= 1 + 3e-7
        return super().finish_step(plan)


class TailDrifting(RunningMean):
    """Rescales the rows of the tails that it continues, by less than any tolerance."""

    def layer_step(self, plan: Any, slot: int, h: None, target: Tensor) -> Tensor:
        for segment in plan.segments:
            part = segment.parts[0]
            self.rows[slot, part.page, : part.row] *= 1 + 3e-7
        return super().layer_step(plan, slot, h, target)


class FirstPages(RunningMean):
    """Restores the first of the exported pages."""

    def restore(
        self, tensors: Mapping[str, Tensor], base: int | None, pages: Sequence[int]
    ) -> None:
        super().restore(tensors, base, pages)
        if pages:
            self.rows[:, list(pages)] = tensors["rows"][:, : len(pages)]


class AnyDtype(RunningMean):
    """Restores tensors of any dtype."""

    def restore(
        self, tensors: Mapping[str, Tensor], base: int | None, pages: Sequence[int]
    ) -> None:
        super().restore({k: v.float() for k, v in tensors.items()}, base, pages)


class AnyTail(RunningMean):
    """Restores a tail into any page."""

    def restore_tail(self, tensors: Mapping[str, Tensor], page: int) -> None:
        rows = tensors["tail.rows"]
        self.rows[:, max(1, min(page, 3)), : rows.shape[1]] = rows


class FillsFirst(RunningMean):
    """Refuses what does not fit, after it has begun."""

    def restore(
        self, tensors: Mapping[str, Tensor], base: int | None, pages: Sequence[int]
    ) -> None:
        self.rows[:, list(pages[:1])] = 0
        super().restore(tensors, base, pages)


class Lending(RunningMean):
    """Exports its own memory."""

    def export(self, version: Any) -> dict[str, Tensor]:
        found = super().export(version)
        if len(version.pages) > 0:
            first, count = version.pages[0], len(version.pages)
            found["rows"] = self.rows[:, first : first + count]
        return found


class OtherLayout(RunningMean):
    """Says another shape than it exports."""

    def layout(self, pages: int, base: bool) -> dict[str, Any]:
        found = super().layout(pages, base)
        return {name: (dtype, shape[::-1]) for name, (dtype, shape) in found.items()}


class Broken(NamedTuple):
    """One way, and how the suite says so."""

    backend: Any
    check: str
    message: str
    layers: int = 2


BROKEN = (
    Broken(RowsInOrder, "oracle_equality", "position .* is off by"),
    Broken(OneVersion, "split_anywhere", r"forwards that end at .*: position .* is off by"),
    Broken(RowShort, "fork_and_rollback", "the branch that was forked: position .* is off by"),
    Broken(ReadsAppend, "reads_leave_no_trace", "READ tokens changed page"),
    Broken(AllGood, "non_finite", "a block with a NaN counts as written"),
    Broken(AllFail, "non_finite", "answer or state of a sound owner depends on the bad one"),
    Broken(Spreading, "non_finite", "answer or state of a sound owner depends on the bad one"),
    Broken(TailLost, "non_finite", "the bad owner's version or tail changed"),
    Broken(NextPage, "ledger", "free memory was written: page"),
    Broken(Reporting, "ledger", "report holds more than plain values"),
    Broken(Drifting, "aliasing", "finish_step changed page"),
    Broken(TailDrifting, "aliasing", "changed rows of a tail that it continues"),
    Broken(FirstPages, "export_restore", "does not fill it with the last page's numbers"),
    Broken(AnyDtype, "export_restore", "no ValueError from a restore of rows as float64"),
    Broken(AnyTail, "export_restore", "no ValueError from a restore_tail"),
    Broken(FillsFirst, "export_restore", "a refused restore of .* changed page"),
    Broken(Lending, "export_restore", "writing to what export returned changed page", layers=1),
    Broken(OtherLayout, "export_restore", "export gives .* layout"),
)
