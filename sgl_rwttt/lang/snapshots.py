"""Snapshots of a branch: files in the server's folder."""

from __future__ import annotations

from sgl_rwttt.core.errors import LedgerMismatch, StateError

from .ledger import Cursor, Ledger
from .owner import Owner
from .transport import Json


def save(owner: Owner, cursor: Cursor, name: str, replace: bool) -> Json:
    """Save the committed version of a settled point under `name`; the server's answer.

    Raises LedgerMismatch when the server saved another version than the ledger is at.
    """
    ledger = cursor.ledger
    point: Json = {"root": ledger.clock.root.hex()}
    if cursor.node is not None:
        point = {"rid": cursor.node.rid, "offset": len(ledger)}
    answer = _control(owner, "save", {"name": name, "replace": replace, **point})
    if answer["version"] != ledger.clock.number:
        raise LedgerMismatch(
            f"the server saved version {answer['version']}, the ledger is at {ledger.clock.number}",
            owner=owner.name,
        )
    return answer


def restore(owner: Owner, cursor: Cursor, name: str) -> Json:
    """Move the cursor to the empty context on a snapshot; what is pending is dropped."""
    with owner.clearing():
        answer = _control(owner, "restore", {"name": name})
        root, chunk = str(answer["root"]), cursor.ledger.clock.chunk
        ledger = Ledger(bytes.fromhex(root), chunk, int(answer["version"]))
        ledger.root = owner.root(root)
    cursor.ledger, cursor.node, cursor.consumed = ledger, None, 0
    cursor.pending_ids, cursor.pending_text = [], ""
    return answer


def _control(owner: Owner, op: str, args: Json) -> Json:
    owner.sweep()
    try:
        return owner.transport.control(op, {"owner": owner.id, **args})
    except StateError as error:
        owner.explain(error)
        raise
