"""Snapshots of a branch: files in the server's folder."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, NamedTuple

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import IncompatibleSnapshot, LedgerMismatch, StateError

from .history import event_at
from .ledger import Cursor, Ledger, Node, Pin
from .owner import Owner
from .transport import Json

if TYPE_CHECKING:
    from .executor import StateExecutor

_BULK = ("tokens", "modes", "client")  # of an answer: what the ledger and the text hold then


def save(owner: Owner, cursor: Cursor, name: str, replace: bool) -> Json:
    """Save the committed version of a settled point under `name`; the server's answer.

    Raises LedgerMismatch when the server saved another version than the ledger is at.
    """
    answer = _control(owner, "save", {"name": name, "replace": replace, **_point(cursor)})
    return _checked(owner, answer, {"version": cursor.ledger.clock.number})


def save_context(owner: Owner, cursor: Cursor, name: str, replace: bool, client: Json) -> Json:
    """As `save`, with the context of the cursor's node, its KV, and `client` beside it.

    Raises RollbackBeyondRetention when the server has lost a part of it.
    """
    args = {"name": name, "replace": replace, "kv": True, "client": client, **_point(cursor)}
    answer = _control(owner, "save", args)
    return _checked(owner, answer, cursor.ledger.place)


def restore(owner: Owner, name: str, chunk: int, kv: bool | None) -> tuple[Cursor, Json, Json]:
    """(place, client part, answer) of a snapshot: the end of its context, or an empty one.

    `kv` true or false takes the one or the other, None what the file holds.
    """
    rid, pin = uuid.uuid4().hex, uuid.uuid4().hex
    with owner.clearing():
        args = {"name": name, "rid": rid, "pin": pin} | ({} if kv is None else {"kv": kv})
        answer = _control(owner, "restore", args)
        root = str(answer["root"])
        number = answer["root_version" if "root_version" in answer else "version"]
        ledger = Ledger(bytes.fromhex(root), chunk, int(number))
        if root != owner.opened["root"]:
            ledger.root, ledger.what = owner.root(root), "clear"
    cursor, client = Cursor(ledger), answer.get("client") or {}
    if "tokens" in answer:
        for first, end, mode in answer["modes"]:
            ledger.push(answer["tokens"][first:end], Effect(mode))
        event = event_at(ledger, rid, str(answer["mode"]), f"restore {name}")
        cursor.node = Node(event, None, owner.trash)
        cursor.pin, cursor.consumed = Pin(pin, owner.trash), len(ledger)
        _checked(owner, answer, ledger.place)
    else:
        ledger.what = f"restore {name}"
    return cursor, client, {key: each for key, each in answer.items() if key not in _BULK}


def described(executor: StateExecutor) -> Json:
    """Text, messages and role of a settled branch, for a file.

    The text is left out where it is what the tokens say; a message is where it stands in the text.
    """
    text, at = executor.text_, 0
    messages: list[Any] = []
    for message in executor.messages_:
        content = message["content"]
        found = text.find(content, at) if isinstance(content, str) else -1
        if found < 0:
            messages.append(message)
            continue
        at = found + len(content)
        messages.append([message["role"], found, at])
    decoded = executor.backend.text.decode(executor.cursor.ledger.tokens)
    return {
        **({} if decoded == text else {"text": text}),
        "messages": messages,
        "role": executor.cur_role,
        "role_begin": executor.cur_role_begin_pos,
    }


class Said(NamedTuple):
    """The client's part of a context."""

    text: str
    messages: list[Any]
    role: str | None
    role_begin: int | None

    def put(self, executor: StateExecutor) -> None:
        """Give it to a branch."""
        executor.text_, executor.messages_ = self.text, self.messages
        executor.cur_role, executor.cur_role_begin_pos = self.role, self.role_begin
        executor.fork_start_text_pos = None


def said(client: Json, decoded: str) -> Said:
    """The inverse of `described`; `decoded` is what the tokens say.

    Raises IncompatibleSnapshot for what no program has saved; a file without anything of a program
    has the text of its tokens and no messages.
    """
    text, role, begin = client.get("text", decoded), client.get("role"), client.get("role_begin")
    messages = client.get("messages", [])
    fits = (
        isinstance(text, str)
        and isinstance(messages, list)
        and isinstance(role, str | None)
        and isinstance(begin, int | None)
        and all(_is_message(each) for each in messages)
    )
    if not fits:
        raise IncompatibleSnapshot("client: no program has saved this file")
    found = [
        {"role": each[0], "content": text[each[1] : each[2]]} if isinstance(each, list) else each
        for each in messages
    ]
    return Said(text, found, role, begin)


def _is_message(item: Any) -> bool:
    if isinstance(item, list):
        return [type(part) for part in item] == [str, int, int]
    return isinstance(item, dict) and {"role", "content"} <= set(item)


def _point(cursor: Cursor) -> Json:
    if cursor.node is None:
        return {"root": cursor.ledger.clock.root.hex()}
    return {"rid": cursor.node.rid, "offset": len(cursor.ledger)}


def _checked(owner: Owner, answer: Json, ours: Json) -> Json:
    theirs = {key: answer[key] for key in ours}
    if theirs != ours:
        raise LedgerMismatch(f"the server says {theirs}, the ledger {ours}", owner=owner.name)
    return answer


def _control(owner: Owner, op: str, args: Json) -> Json:
    owner.sweep()
    try:
        return owner.transport.control(op, {"owner": owner.id, **args})
    except StateError as error:
        owner.explain(error)
        raise
