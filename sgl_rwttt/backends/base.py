"""What the runtime asks of an update rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from sgl_rwttt.core.segment import Segment

Plan = TypeVar("Plan")


class StateBackend(Protocol[Plan]):
    """One update rule with the memory of its states.

    One forward pass is ``begin_step``, then ``layer_step`` once per state layer, then
    ``finish_step``. The backend knows pages and slots; which owner holds them, and what is
    committed, is the store's business.
    """

    name: str

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

    def begin_step(self, segments: Sequence[Segment]) -> Plan:
        """Plan one forward over ``segments``. Changes no state; raises on an illegal step."""
        ...

    def layer_step(self, plan: Plan, slot: int, h: Tensor, target: Tensor) -> Tensor:
        """Take the new evidence of state layer ``slot`` and return the state's part of its output.

        Writes only rows and slots that the plan's candidates own. [N, d] float32, zeros for rows
        of no segment.
        """
        ...

    def finish_step(self, plan: Plan) -> list[bool]:
        """Run the deferred writes; per segment, whether its candidate may be committed."""
        ...

    def copy_rows(self, src: int, dst: int, rows: int) -> None:
        """Copy the first ``rows`` rows of page ``src`` to page ``dst``, all layers."""
        ...
