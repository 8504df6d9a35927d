"""A place that a program can come back to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .ledger import Cursor, Pin
from .owner import Owner

if TYPE_CHECKING:
    from .executor import StateExecutor


@dataclass(frozen=True, slots=True)
class Mark:
    """Everything of a branch that moves together: place, text, messages, role, variables."""

    cursor: Cursor
    text: str
    messages: list[Any]
    role: str | None
    role_begin: int | None
    variables: dict[str, Any]
    meta_info: dict[str, Any]

    @classmethod
    def of(cls, executor: StateExecutor) -> Mark:
        """The branch as it stands now (runs in its worker)."""
        return cls(
            executor.cursor.copy(),
            executor.text_,
            list(executor.messages_),
            executor.cur_role,
            executor.cur_role_begin_pos,
            dict(executor.variables),
            dict(executor.meta_info),
        )

    def restore(self, executor: StateExecutor) -> None:
        """Put the branch here; Python variables of the program stay as they are."""
        executor.cursor = self.cursor.copy()
        executor.text_ = self.text
        executor.messages_ = list(self.messages)
        executor.cur_role = self.role
        executor.cur_role_begin_pos = self.role_begin
        executor.variables = dict(self.variables)
        executor.meta_info = dict(self.meta_info)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Checkpoint:
    """An immutable place in a lineage, retained on the server while this object lives.

    `State.rollback` and `State.fork(at=...)` of the same run take it, in any branch.
    """

    name: str | None  # as given to `State.checkpoint`
    owner: Owner = field(repr=False)  # of the run
    mark: Mark = field(repr=False)
    pin: Pin | None = field(repr=False)  # None: nothing was pending, the node itself retains it

    @property
    def position(self) -> int:
        """Tokens of the context."""
        return len(self.mark.cursor.ledger)

    @property
    def version(self) -> int:
        """Version number."""
        return self.mark.cursor.ledger.clock.number

    @property
    def state_id(self) -> str:
        """State id (hex)."""
        return self.mark.cursor.ledger.clock.state_id.hex()
