"""One branch of a program: sglang.lang's text and variables, and a place in a lineage."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn

from sglang.lang.ir import (
    SglCommitLazy,
    SglConcateAndAppend,
    SglGen,
    SglImage,
    SglRoleBegin,
    SglRoleEnd,
    SglSelect,
    SglSeparateReasoning,
    SglVarScopeBegin,
    SglVarScopeEnd,
    SglVideo,
)

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import InvalidStateRequest, ReadOnlyState, RollbackBeyondRetention

from . import snapshots
from .answer import Answer
from .ledger import Cursor
from .steps import Step
from .transport import Json
from .worker import BranchWorker

_REFUSED = {
    SglImage: "images: the served rules read text only",
    SglVideo: "videos: the served rules read text only",
    SglSeparateReasoning: "separate_reasoning: it rewrites text that the state has read",
    SglConcateAndAppend: 'join("concate_and_append"): states cannot be concatenated',
}


class StateExecutor(BranchWorker):
    """Executes a branch's expressions; everything below runs in its worker."""

    def __init__(self, *args: Any, parent: StateExecutor | None = None, **kwargs: Any) -> None:
        self._cursor: Cursor | None = None
        self.parent = parent
        self.frozen_depth = 0
        self.locked_depth = 0  # unfreeze cannot go below (a peek)
        self._scopes: dict[str, int] = {}  # where the open var_scopes began in the text
        super().__init__(*args, **kwargs)

    @property
    def cursor(self) -> Cursor:
        """The place in the lineage; opens the owner at the first use."""
        if self._cursor is None:
            self._cursor = Cursor(self.owner.new_ledger())
        return self._cursor

    @cursor.setter
    def cursor(self, cursor: Cursor) -> None:
        self._leave_siblings()
        self._cursor = cursor

    @property
    def place(self) -> Cursor | None:
        """The place in the lineage; None before the first use, which it does not count as."""
        return self._cursor

    @property
    def mode(self) -> Effect:
        """The mode of the next tokens."""
        return Effect.READ if self.frozen_depth else Effect.WRITE

    def ask(self, run: Callable[[], Any]) -> Any:
        """Queue `run` and wait for what it returns; a request of it goes alone.

        A program that waits for one branch asks its siblings for nothing meanwhile.
        """

        def alone() -> Any:
            self._leave_siblings()
            return run()

        return super().ask(alone)

    def _leave_siblings(self) -> None:
        """Their batch of first requests need not wait for this branch."""
        if self._cursor is not None and self._cursor.seat is not None:
            self._cursor.seat.leave()
            self._cursor.seat = None

    def _skip(self, expr: Any, error: BaseException) -> None:
        self._leave_siblings()
        super()._skip(expr, error)

    def _let_go(self) -> None:
        self._leave_siblings()
        if self._cursor is not None:
            self._cursor.node = self._cursor.pin = None
            self._cursor.ledger.root = None

    # Expressions

    def _execute(self, other: Any) -> None:
        if isinstance(other, Step):
            other.execute()
        elif type(other) in _REFUSED:
            refuse(_REFUSED[type(other)])
        else:
            super()._execute(other)

    def _execute_fill(self, value: Any, prefix: bool = False) -> None:
        self.text_ += str(value)
        self.cursor.pending_text += str(value)

    def _execute_role_begin(self, expr: SglRoleBegin) -> None:
        if self.cur_role is not None:
            refuse(f"a role inside a role: close {self.cur_role!r} before {expr.role!r} begins")
        super()._execute_role_begin(expr)

    def _execute_role_end(self, expr: SglRoleEnd) -> None:
        if self.cur_role is None:
            refuse(f"the end of {expr.role!r}: no role is open here")
        super()._execute_role_end(expr)

    def _execute_commit_lazy_operations(self, expr: SglCommitLazy) -> None:
        self.settle()

    def _execute_gen(self, expr: SglGen) -> None:
        text = self.text_
        self.cursor.notes.append("gen" if expr.name is None else f"gen {expr.name}")
        for answer in self._answers(expr):
            self.text_ = text[: len(text) - answer.mended] + answer.text
            if expr.name is not None:
                self.variables[expr.name] = answer.text
                self.meta_info[expr.name] = answer.meta
            self._notify()
        self._arrived(expr.name)

    def _answers(self, expr: SglGen) -> Iterable[Answer]:
        own = expr.sampling_params
        if isinstance(own.stop, list):  # sglang.lang appends the template's stops to it
            own = replace(own, stop=own.stop[:])
        params = self._resolve_sampling_params(own)
        logprobs = self.parent is not None  # branches are compared by them
        if self.stream:
            return self.backend.generate_stream(
                self.owner, self.cursor, self.mode, params, logprobs
            )
        return [self.backend.generate(self.owner, self.cursor, self.mode, params, logprobs)]

    def _execute_select(self, expr: SglSelect) -> None:
        if expr.temperature > 1e-5:
            refuse("select(temperature > 0): it takes the best choice")
        self.ground()
        decision, ids = self.backend.select(
            self.owner, self.cursor, expr.choices, expr.choices_method
        )
        self.cursor.pending_ids = ids
        self.cursor.notes.append("select" if expr.name is None else f"select {expr.name}")
        self.text_ += decision.decision
        if expr.name is not None:
            self.variables[expr.name] = decision.decision
            self.meta_info[expr.name] = decision.meta_info
        self._arrived(expr.name)

    def _execute_var_scope_begin(self, expr: SglVarScopeBegin) -> None:
        self._scopes[expr.name] = len(self.text_)

    def _execute_var_scope_end(self, expr: SglVarScopeEnd) -> None:
        self.variables[expr.name] = self.text_[self._scopes.pop(expr.name) :]
        self._arrived(expr.name)

    # Steps that need the server (they run in the worker)

    def settle(self, pin: str | None = None) -> bool:
        """Have the server consume everything said so far; False when it had already.

        `pin` names the point that the commit node retains.
        """
        if self.cursor.is_settled:
            return False
        self.backend.commit(self.owner, self.cursor, self.mode, pin=pin)
        return True

    def ground(self) -> None:
        """As `settle`, and make sure that there is a token to predict from."""
        self.settle()
        if not self.cursor.ledger.tokens:
            self.backend.commit(self.owner, self.cursor, self.mode)  # BOS, or it refuses

    def refreeze(self, step: int) -> None:
        """Go `step` levels deeper into (or out of) read mode.

        What is pending is consumed first, in the mode in which it was said.
        """
        depth = self.frozen_depth + step
        if depth < self.locked_depth:
            what = "a peek stays in read mode" if self.locked_depth else "the state is not frozen"
            raise (ReadOnlyState if self.locked_depth else InvalidStateRequest)(what)
        if (depth > 0) != (self.frozen_depth > 0) and self._cursor is not None:
            cursor = self.cursor
            if cursor.pending_ids or cursor.pending_text:
                self.backend.commit(self.owner, cursor, self.mode)
        self.frozen_depth = depth

    def require_writable(self, what: str) -> None:
        """Raise ReadOnlyState inside a frozen region."""
        if self.frozen_depth:
            raise ReadOnlyState(f"{what} would move the state, which is frozen here")

    def adapt(self, text: str, epochs: int, keep: bool) -> None:
        """Write `text` into the state, `epochs` times; unless `keep`, end the context each time."""
        self.require_writable("adapt")
        cursor, before = self.cursor, self.cursor.ledger.clock.number
        for _ in range(epochs):
            at_root = not cursor.ledger.tokens and not cursor.pending_ids
            cursor.pending_ids += self.backend.text.encode(cursor.pending_text, at_root)
            cursor.pending_text = text
            self.text_ += text
            cursor.notes.append("adapt")
            if keep:
                self.settle()
            else:
                self.clear("drop")
        if cursor.ledger.clock.number == before:
            warnings.warn(
                f"adapt wrote no version: the text is shorter than a chunk of "
                f"{cursor.ledger.clock.chunk} tokens",
                stacklevel=2,
            )

    def clear(self, tail: str) -> None:
        """End the context: KV, position, text and messages go, the committed version stays."""
        if tail == "commit":
            self.require_writable('clear_context(tail="commit")')
        self._require_no_role()
        if self.cursor.ledger.tokens or not self.cursor.is_settled:
            if self.cursor.notes[-1:] != ["adapt"]:
                self.cursor.notes.append("clear")
            self.backend.commit(self.owner, self.cursor, self.mode, clear=tail)
        self._forget_context()

    def snapshot(self, name: str, replace: bool, kv: bool) -> Json:
        """Save the state here, once everything said so far is consumed; with `kv` the context too.

        An empty context is saved as its version alone.
        """
        self.settle()
        if not kv or self.cursor.node is None:
            return snapshots.save(self.owner, self.cursor, name, replace)
        client = snapshots.described(self)
        try:
            return snapshots.save_context(self.owner, self.cursor, name, replace, client)
        except RollbackBeyondRetention:
            self.backend.commit(self.owner, self.cursor, self.mode)  # computes again what was lost
            return snapshots.save_context(self.owner, self.cursor, name, replace, client)

    def restore(self, name: str, kv: bool | None) -> Json:
        """Go to where a snapshot was saved; everything said so far is dropped."""
        self.require_writable("restore")
        self._require_no_role()
        chunk = self.cursor.ledger.clock.chunk
        cursor, client, answer = snapshots.restore(self.owner, name, chunk, kv)
        said = snapshots.said(client, self.backend.text.decode(cursor.ledger.tokens))
        self.cursor = cursor
        said.put(self)
        self._notify()
        return answer

    def _require_no_role(self) -> None:
        if self.cur_role is not None:
            raise InvalidStateRequest(f"close the role {self.cur_role!r} before the context ends")

    def _forget_context(self) -> None:
        self.text_, self.messages_, self.fork_start_text_pos = "", [], None
        self._notify()


def refuse(what: str) -> NoReturn:
    """Raise InvalidStateRequest for something that sglang.lang can say and we cannot do."""
    raise InvalidStateRequest(f"not supported here: {what}")
