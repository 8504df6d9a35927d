"""The client's own book of a lineage: tokens, modes and state id, without asking the server."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.lineage import LineageClock, ModeSpans, cleared_root_id

if TYPE_CHECKING:
    from .history import Event
    from .siblings import Seat


class Trash:
    """Server-side things that nobody refers to any more, to be freed at the owner's next call.

    Filled by destructors in whatever thread they run, so adding is one atomic append.
    """

    def __init__(self) -> None:
        self._nodes: deque[tuple[str, str | None]] = deque()
        self._pins: deque[str] = deque()
        self._roots: deque[str] = deque()

    def __len__(self) -> int:
        return len(self._nodes) + len(self._pins) + len(self._roots)

    def add_node(self, rid: str, parent: str | None) -> None:
        """A node lost its last reference (all its descendants did before)."""
        self._nodes.append((rid, parent))

    def add_pin(self, name: str) -> None:
        """A pin lost its last reference."""
        self._pins.append(name)

    def add_root(self, root: str) -> None:
        """A cleared context's root lost its last reference."""
        self._roots.append(root)

    def take_roots(self) -> list[str]:
        """Roots to release, emptying their part of the trash."""
        return [self._roots.popleft() for _ in range(len(self._roots))]

    def take(self) -> tuple[list[str], list[str]]:
        """(rids to drop, pins to lift), emptying their part of the trash.

        Dropping a node frees its descendants too, so only the topmost of each subtree is named.
        """
        nodes = [self._nodes.popleft() for _ in range(len(self._nodes))]
        pins = [self._pins.popleft() for _ in range(len(self._pins))]
        rids = {rid for rid, _ in nodes}
        return [rid for rid, parent in nodes if parent not in rids], pins


class Node:
    """One finished request of an owner; a head, a checkpoint or a child keeps it alive."""

    __slots__ = ("_trash", "event", "parent", "rid")

    def __init__(self, event: Event, parent: Node | None, trash: Trash) -> None:
        assert event.branch is not None
        self.rid = event.branch
        self.event = event
        self.parent = parent
        self._trash = trash

    def __del__(self) -> None:
        self._trash.add_node(self.rid, None if self.parent is None else self.parent.rid)


class Pin:
    """A retained point on the server; lifted when the last reference to it goes."""

    __slots__ = ("_trash", "name")

    def __init__(self, name: str, trash: Trash) -> None:
        self.name = name
        self._trash = trash

    def __del__(self) -> None:
        self._trash.add_pin(self.name)


class Root:
    """The root of a cleared context; released when the last ledger on it goes."""

    __slots__ = ("__weakref__", "_trash", "id")

    def __init__(self, root: str, trash: Trash) -> None:
        self.id = root
        self._trash = trash

    def __del__(self) -> None:
        self._trash.add_root(self.id)


class Ledger:
    """Tokens of one context with their modes, and the lineage clock that stands behind the last.

    A sampled token belongs to the lineage in the mode of the request that sampled it, although
    the server consumes it only with the next node.
    """

    __slots__ = ("clock", "first", "root", "spans", "tokens", "what")

    def __init__(self, root: bytes, chunk: int, number: int = 0, what: str = "start") -> None:
        """`number` is the root's version, `what` how the context began (see `history.Event`)."""
        self.first = number
        self.what = what
        self.root: Root | None = None  # None: the default root, which needs no retaining
        self.clock = LineageClock(root, chunk, number)
        self.spans = ModeSpans()
        self.tokens: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def push(self, tokens: Sequence[int], mode: Effect) -> None:
        """Append tokens of one mode."""
        self.tokens.extend(tokens)
        self.spans.append(len(tokens), mode)
        self.clock.push(tokens, mode)

    def clock_after(self, tokens: Sequence[int], mode: Effect) -> LineageClock:
        """The clock as it would be after `tokens`; the ledger stays."""
        clock = self.clock.copy()
        clock.push(tokens, mode)
        return clock

    @property
    def place(self) -> dict[str, int | str]:
        """Where the ledger ends, in the words of the server's state report."""
        clock = self.clock
        return {
            "version": clock.number,
            "position": clock.position,
            "tail": clock.rows,
            "state_id": clock.state_id.hex(),
        }

    def copy(self) -> Ledger:
        """An independent ledger at the same point."""
        other = object.__new__(Ledger)
        other.first, other.what = self.first, self.what
        other.root = self.root
        other.clock = self.clock.copy()
        other.spans = self.spans.slice(len(self.spans))
        other.tokens = self.tokens[:]
        return other

    def cleared(self, what: str = "clear") -> Ledger:
        """The empty ledger of the context that follows a reset here; the tail is dropped."""
        clock = self.clock
        return Ledger(cleared_root_id(clock.version_id), clock.chunk, clock.number, what)


@dataclass(frozen=True, slots=True)
class Lineage:
    """What a state is a function of: the root of the context, then tokens in their modes.

    From `State.lineage`; equal lineages are equal states.
    """

    root: str  # id of the weights that the context began on, hex
    tokens: tuple[int, ...]  # ids of the context
    modes: tuple[tuple[int, int, str], ...]  # (first, end, "read" or "write") over `tokens`
    state_id: str  # hex


@dataclass(slots=True)
class Cursor:
    """Where one branch of a program stands.

    `pending_ids`, then `pending_text`, were added by the program and not yet consumed by a node.
    """

    ledger: Ledger
    node: Node | None = None  # None: at the root of the context
    consumed: int = 0  # tokens of the ledger that the server has consumed
    pending_ids: list[int] = field(default_factory=list)
    pending_text: str = ""
    pin: Pin | None = None  # retains a restored point until a request has gone on from it
    notes: list[str] = field(default_factory=list)  # what the next request is for
    seat: Seat | None = None  # until the first request of a branch; not copied

    @property
    def is_settled(self) -> bool:
        """Whether the server has consumed everything up to here."""
        return not (self.pending_ids or self.pending_text) and self.consumed == len(self.ledger)

    @property
    def lineage(self) -> Lineage:
        """The lineage up to here, without what is pending."""
        ledger = self.ledger
        return Lineage(
            root=ledger.clock.root.hex(),
            tokens=tuple(ledger.tokens),
            modes=tuple((a, b, mode.value) for a, b, mode in ledger.spans.runs()),
            state_id=ledger.clock.state_id.hex(),
        )

    def copy(self) -> Cursor:
        """An independent cursor at the same place, what is pending included."""
        return Cursor(
            self.ledger.copy(),
            self.node,
            self.consumed,
            self.pending_ids[:],
            self.pending_text,
            self.pin,
            self.notes[:],
        )
