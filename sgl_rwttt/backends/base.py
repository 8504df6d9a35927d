"""What the runtime asks of an update rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sgl_rwttt.backends.page_pools import Readable
    from sgl_rwttt.core.segment import Segment


class Plan(Protocol):
    """What ``begin_step`` returns, as far as the runtime looks into it (after ``finish_step``)."""

    retried: int  # blocks that were computed once more, each alone
    failed: dict[int, str]  # segment -> why its write raised twice; empty for "not finite"

    def written_pages(self, segment: int) -> tuple[int, ...]:
        """Pages of the completed blocks that one segment may commit, in order."""
        ...

    def unchanged_pages(self, segment: int) -> tuple[int, ...]:
        """Those of ``written_pages`` whose update left the state as it was."""
        ...


OwnPlan = TypeVar("OwnPlan", bound=Plan)


class StateBackend(Protocol[OwnPlan]):
    """One update rule with the memory of its states.

    One forward pass is ``begin_step``, then ``layer_step`` once per state layer, then
    ``finish_step``. The backend knows pages and slots; which owner holds them, and what is
    committed, is the store's business.
    """

    name: str
    stateless: bool  # whether a request may own no state

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all state layers."""
        ...

    @property
    def base_bytes(self) -> int:
        """Bytes of one dense base over all state layers."""
        ...

    def report(self) -> dict[str, Any]:
        """Sizes and rule parameters, plain values only."""
        ...

    def begin_step(self, segments: Sequence[Segment]) -> OwnPlan:
        """Plan one forward over ``segments``; raises on an illegal step.

        Changes nothing but slots that the segments' candidates own.
        """
        ...

    def layer_step(self, plan: OwnPlan, slot: int, h: Tensor, target: Tensor) -> Tensor:
        """Take the new evidence of state layer ``slot`` and return the state's part of its output.

        Writes only rows and slots that the plan's candidates own. [N, d] float32, zeros for rows
        of no segment.
        """
        ...

    def finish_step(self, plan: OwnPlan) -> list[bool]:
        """Run the deferred writes; per segment, whether its candidate may be committed."""
        ...

    def layout(self, pages: int, base: bool) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor that ``export`` returns for so many pages and a base."""
        ...

    def export(self, version: Readable) -> dict[str, Tensor]:
        """Copies of all numbers that reading a version takes, contiguous."""
        ...

    def restore(
        self, tensors: Mapping[str, Tensor], base: int | None, pages: Sequence[int]
    ) -> None:
        """Put what ``export`` returned into a base and the last ``len(pages)`` pages.

        Raises ValueError, changing nothing, for tensors that do not fit.
        """
        ...

    def tail_layout(self, rows: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and shape of each tensor that ``export_tail`` returns for so many rows."""
        ...

    def export_tail(self, page: int, rows: int) -> dict[str, Tensor]:
        """Copies of the first ``rows`` rows of an open page, contiguous."""
        ...

    def restore_tail(self, tensors: Mapping[str, Tensor], page: int) -> None:
        """Put what ``export_tail`` returned into the first rows of an open page.

        Raises ValueError, changing nothing, for tensors that do not fit.
        """
        ...

    def copy_rows(self, src: int, dst: int, rows: int) -> None:
        """Copy the first ``rows`` rows of page ``src`` to page ``dst``, all layers."""
        ...
