"""An owner's lineages as a graph of text, newest first, in the manner of git log --graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .program import resolve_backend
from .transport import Json

if TYPE_CHECKING:
    from .state import State

Names = Mapping[str, Sequence[str]]
_SHORT = 8


class _Row(NamedTuple):
    """A request or the root of a context, with its parent's key."""

    key: str
    parent: str | None
    mark: str
    label: str


def tree(owner: State | str, backend: Any = None) -> str:
    """The requests that an owner's server keeps, as a graph.

    `owner` is a state, whose branches and checkpoints are named then, or an owner's id on
    `backend` (default: the default one). The answer shows no id by which the owner could be used.
    Raises UnknownOwner or OwnerReleased.
    """
    if isinstance(owner, str):
        transport = resolve_backend(backend).transport
        return tree_of(transport.control("owner", {"owner": owner}))
    owner.sync()
    executor = owner.stream_executor
    held = executor.backend.transport.control("owner", {"owner": executor.owner.id})
    return tree_of(held, _names(owner))


def tree_of(held: Json, names: Names | None = None) -> str:
    """The graph of a server's answer to `/ttt/owner`; `names` are shown beside the rids."""
    running = sum(bool(branch["running"]) for branch in held["branches"])
    title = (
        f"owner {held['name']}: {held['nodes']} requests ({running} running), "
        f"{held['pin_count']} pins, {held['root_count']} roots, {held['referenced_bytes']} bytes"
    )
    older = ["(older requests are left out)"] if held.get("truncated") else []
    return "\n".join([title, *_graph(_rows(held["branches"], names or {})), *older])


def _rows(branches: Sequence[Json], names: Names) -> list[_Row]:
    """Oldest first, each parent before its children."""
    rows: dict[str, _Row] = {}
    cleared = {b["next_root"]: b["rid"] for b in reversed(branches) if b.get("next_root")}
    for branch in branches:
        parent = branch["parent"]
        root = branch.get("root")
        if parent is None and root is not None:
            parent = f"root {root}"
            if parent not in rows:
                rows[parent] = _Row(parent, cleared.get(root), "o", f"root {root[:_SHORT]}")
        label = _label(branch, names.get(branch["rid"], ()))
        rows[branch["rid"]] = _Row(branch["rid"], parent, "*", label)
    return list(rows.values())


def _label(branch: Json, names: Sequence[str]) -> str:
    parts = [branch["rid"][:_SHORT]]
    if branch.get("position") is not None:
        parts.append(f"@{branch['position']} v{branch['version']}+{branch['tail']}")
        parts.append(branch["state_id"][:_SHORT])
    parts += [branch["mode"] or "refused"]
    if branch["running"]:
        parts.append("running")
    if branch.get("pin"):
        parts.append("pinned")
    if names:
        parts.append(f"({', '.join(names)})")
    return " ".join(parts)


def _graph(rows: Sequence[_Row]) -> list[str]:
    """Newest first. A column is a line that runs down to the parent it waits for."""
    columns: list[str | None] = []
    known = {row.key for row in rows}
    lines = []
    for row in reversed(rows):
        waiting = [i for i, key in enumerate(columns) if key == row.key]
        for other in reversed(waiting[1:]):
            lines.append(_merge(columns, waiting[0], other))
            columns[other] = None
        at = waiting[0] if waiting else _free(columns)
        columns[at] = row.key
        while columns[-1] is None:
            columns.pop()
        marks = [_mark(key, i == at, row.mark) for i, key in enumerate(columns)]
        lines.append(f"{' '.join(marks)}  {row.label}")
        columns[at] = row.parent if row.parent in known else None
    return lines


def _mark(key: str | None, here: bool, mark: str) -> str:
    return mark if here else " " if key is None else "|"


def _free(columns: list[str | None]) -> int:
    if None not in columns:
        columns.append(None)
    return columns.index(None)


def _merge(columns: Sequence[str | None], target: int, other: int) -> str:
    """A line in which the column `other` runs into `target`, left of it."""
    line = [" "] * (2 * len(columns))
    for i, key in enumerate(columns):
        line[2 * i] = " " if key is None or i == other else "|"
    for at in range(2 * target + 1, 2 * other - 2):
        line[at] = "_" if line[at] == " " else line[at]
    line[2 * other - 1] = "/"
    return "".join(line).rstrip()


def _names(state: State) -> Names:
    """What the program calls the requests: heads of its branches, checkpoints, what they said."""
    ours = state.stream_executor
    found: dict[str, list[str]] = {}
    for executor in ours.owner.branches():
        cursor = executor.place
        node = None if cursor is None else cursor.node
        if node is not None:
            found.setdefault(node.rid, []).append("HEAD" if executor is ours else "branch")
        while node is not None:
            said = found.setdefault(node.rid, [])
            if node.event.what not in said:
                said.append(node.event.what)
            node = node.parent
    for name, checkpoint in state.checkpoints.items():
        place = checkpoint.mark.cursor.node
        if place is not None:
            found.setdefault(place.rid, []).append(f"checkpoint {name}")
    return found
