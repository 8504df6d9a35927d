"""The history of a branch: where its requests ended, as the client knows it itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .ledger import Cursor, Ledger


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a lineage: a request of it and the place where it ended, or the root."""

    branch: str | None  # request id; None: the root of the context
    position: int  # tokens of the context
    version: int  # version number
    tail: int  # write-mode tokens since the last boundary
    state_id: str  # hex
    mode: str | None  # of the request: "write" or "read"; None: the root
    what: str  # "fill", "gen name", "select name", "adapt", "restore name"; root: "start", "clear"
    checkpoints: tuple[str, ...] = ()  # names of the checkpoints that stand here

    def __str__(self) -> str:
        names = "".join(f" [{name}]" for name in self.checkpoints)
        return (
            f"@{self.position} v{self.version}+{self.tail} {self.state_id[:8]} "
            f"{self.mode or 'root'} {self.what}{names}"
        )

    def __repr__(self) -> str:
        return f"<{self}>"


def event_at(ledger: Ledger, rid: str, mode: str, what: str) -> Event:
    """A request that ended where the ledger ends."""
    clock = ledger.clock
    state_id = clock.state_id.hex()
    return Event(rid, clock.position, clock.number, clock.rows, state_id, mode, what)


def history_of(cursor: Cursor, checkpoints: Mapping[str, Cursor]) -> tuple[Event, ...]:
    """The events from the root of the context to the newest request, newest last.

    `checkpoints` are the places of checkpoints by name.
    """
    ledger, node = cursor.ledger, cursor.node
    root = ledger.clock.root
    named: dict[object, list[str]] = {}
    for name, at in checkpoints.items():
        named.setdefault(at.ledger.clock.root if at.node is None else at.node, []).append(name)
    events: list[tuple[object, Event]] = []
    while node is not None:
        events.append((node, node.event))
        node = node.parent
    start = Event(None, 0, ledger.first, 0, root.hex(), None, ledger.what)
    events.append((root, start))
    return tuple(
        replace(event, checkpoints=tuple(named.get(at, ()))) for at, event in reversed(events)
    )
