"""The state that a program receives as `s`."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from sgl_rwttt.core.errors import (
    ForeignOwner,
    InvalidStateRequest,
    RollbackBeyondRetention,
    UnsupportedByRule,
)

from .answer import Score
from .branches import Branches
from .checkpoint import Checkpoint, Mark
from .executor import StateExecutor
from .history import Event, history_of
from .ledger import Pin
from .observable import Observable
from .steps import Step

Place = Checkpoint | str | None


class State(Observable):
    """A running program's text, variables and model state, on one branch of its owner.

    Everything said with `+=` is queued; errors of it are raised at the next use.
    """

    def __init__(self, stream_executor: StateExecutor) -> None:
        super().__init__(stream_executor)
        self.ret_value: Any = None  # what the program returned
        self._last: Checkpoint | None = None
        self._named: dict[str, Checkpoint] = {}

    # Branching

    def fork(self, size: int = 1, at: Place = None) -> Branches:
        """`size` branches from here, or from a checkpoint `at`; this state stays usable.

        What is pending is consumed first, once, by this state. Raises StateCapacity,
        RollbackBeyondRetention, ForeignOwner for a checkpoint of another run.
        """
        if size < 1:
            raise InvalidStateRequest(f"fork({size}): at least one branch")
        if at is None:
            mark, pin = self._settled_mark()
        else:
            checkpoint = self._place(at)
            mark, pin = checkpoint.mark, checkpoint.pin
            self.sync()  # a freeze may be queued, and the branches are born in the present mode
        return Branches([self._child(mark) for _ in range(size)], self, pin)

    def keep(self, branch: State) -> None:
        """Take over a branch's place, text, messages and variables.

        The others are freed when their `with` ends. Raises ForeignOwner unless `branch` is a live
        branch of this state.
        """
        ours, theirs = self.stream_executor, branch.stream_executor
        if theirs.parent is not ours:
            raise ForeignOwner("keep takes a branch of this state", owner=ours.owner.name)
        ours.sync()  # a freeze may be queued

        def mark() -> Mark:
            if theirs.mode is not ours.mode:
                theirs.settle()
            return Mark.of(theirs)

        ours.ask(partial(theirs.ask(mark).restore, ours))

    @contextmanager
    def peek(self) -> Iterator[State]:
        """A scratch branch in read mode: nothing of it stays but what the program takes out.

        Raises ReadOnlyState inside, for what would write.
        """
        with self.fork(1) as branches:
            executor = branches[0].stream_executor
            executor.frozen_depth = executor.locked_depth = 1
            yield branches[0]

    @contextmanager
    def copy(self, position_ids_offset: Any = None) -> Iterator[State]:
        """A scratch branch in the present mode."""
        with self.fork(1) as branches:
            yield branches[0]

    # Going back

    def checkpoint(self, name: str | None = None) -> Checkpoint:
        """Retain this place, to come back to it or to fork from it; pending text is consumed first.

        It is retained while the returned object lives. `name` is another way to say it, for this
        branch and those forked from it later. Raises StateCapacity.
        """
        mark, pin = self._settled_mark()
        self._last = Checkpoint(name, self.stream_executor.owner, mark, pin)
        if name is not None:
            self._named[name] = self._last
        return self._last

    def rollback(self, to: Place = None) -> None:
        """Go back to a checkpoint (default: the last): weights, tail, KV, text, messages, role and
        the program's named results together. Python variables, files and tools stay.

        Raises RollbackBeyondRetention, ForeignOwner.
        """
        checkpoint = self._place(to)
        executor = self.stream_executor
        executor.ask(partial(checkpoint.mark.restore, executor))
        self._last = checkpoint

    # Read mode

    def freeze(self) -> None:
        """Read mode from here on (nests); the tail waits."""
        self._queue(partial(self.stream_executor.refreeze, 1))

    def unfreeze(self) -> None:
        """End the innermost `freeze`. Raises ReadOnlyState in a peek."""
        self._queue(partial(self.stream_executor.refreeze, -1))

    @contextmanager
    def frozen(self) -> Iterator[State]:
        """A region in read mode; it yields this state."""
        self.freeze()
        try:
            yield self
        finally:
            if self.stream_executor.error_ is None:
                self.unfreeze()

    # Writing and clearing

    def adapt(self, x: str, epochs: int = 1, context: Literal["clear", "keep"] = "clear") -> None:
        """Write a text into the state, `epochs` times.

        With context="clear" the context ends each time and only the committed version stays; a
        tail shorter than a chunk is dropped. "keep" leaves the text in the context. Raises
        ReadOnlyState in a frozen region.
        """
        if not isinstance(x, str) or not x:
            raise InvalidStateRequest("adapt takes a text that is not empty")
        if epochs < 1 or context not in ("clear", "keep"):
            raise InvalidStateRequest(
                f"adapt(epochs={epochs}, context={context!r}): epochs >= 1, "
                'context is "clear" or "keep"'
            )
        self._queue(partial(self.stream_executor.adapt, x, epochs, context == "keep"))

    def clear_context(self, tail: Literal["drop", "commit"] = "drop") -> None:
        """Empty the context: KV, position, text and messages go, the committed version stays.

        `tail` says what becomes of the evidence that is not yet a version: "drop", or "commit"
        where the rule allows a short chunk (else UnsupportedByRule).
        """
        if tail not in ("drop", "commit"):
            raise InvalidStateRequest(f'clear_context(tail={tail!r}): "drop" or "commit"')
        self._queue(partial(self.stream_executor.clear, tail))

    def flush(self) -> None:
        """Have the server consume everything said so far; raises what went wrong with it."""
        self.stream_executor.ask(self.stream_executor.settle)

    def commit(self) -> None:
        """Force a boundary here. Raises UnsupportedByRule unless the rule allows a short chunk."""
        executor = self.stream_executor

        def run() -> None:
            executor.require_writable("commit")
            rule = executor.owner.opened.get("rule")
            raise UnsupportedByRule(
                f"rule {rule} writes complete chunks of {executor.cursor.ledger.clock.chunk} "
                "tokens only",
                owner=executor.owner.name,
            )

        executor.ask(run)

    # Files

    def snapshot(self, name: str, kv: bool = False, replace: bool = False) -> dict[str, Any]:
        """Save the state to a file in the server's `--ttt-snapshot-dir`.

        What is pending is consumed first. Without `kv` the file holds what `clear_context` would
        keep, and the answer says so: version, tail_dropped, bytes. With `kv` it holds the context
        too: tail, tokens, KV, text, messages and role; what the server has lost of it is computed
        again first. An existing file is refused unless `replace`. Raises StateCapacity,
        RollbackBeyondRetention, InvalidStateRequest.
        """
        executor = self.stream_executor
        answer: dict[str, Any] = executor.ask(partial(executor.snapshot, name, replace, kv))
        return answer

    def restore(self, name: str, kv: bool | None = None) -> dict[str, Any]:
        """Go to where a snapshot was saved; the text and what is pending are dropped.

        A file with a context puts the program in the middle of it, with its text, messages and
        role, and without computing it again; the answer says what was loaded and what was there.
        `kv=False` takes the weights of such a file alone, in an empty context; `kv=True` refuses
        a file without a context.

        Python variables, named results and checkpoints stay. Raises ReadOnlyState in a frozen
        region, IncompatibleSnapshot naming the field, UnknownState, StateCapacity.
        """
        executor = self.stream_executor
        answer: dict[str, Any] = executor.ask(partial(executor.restore, name, kv))
        return answer

    # Asking

    def score(self, text: str) -> Score:
        """Log-probabilities of `text` here, read only: the state does not move.

        In an empty context the text's first token (the BOS, where the tokenizer adds one) has
        nothing to be predicted from and is not counted. What is pending is consumed first. Raises
        InvalidStateRequest for a text without a token to predict.
        """
        executor = self.stream_executor

        def run() -> Score:
            executor.settle()
            return executor.backend.score(executor.owner, executor.cursor, text)

        score: Score = executor.ask(run)
        return score

    def history(self) -> tuple[Event, ...]:
        """The requests of this branch and where they ended, from the root of the context to now.

        What was rolled back is not in it, nor what is pending. The server is not asked.
        """
        self.sync()
        places = {name: checkpoint.mark.cursor for name, checkpoint in self._named.items()}
        return history_of(self.stream_executor.cursor, places)

    # The end

    def release(self) -> None:
        """Free the owner: every branch and checkpoint of the run. Idempotent.

        Needed after `run(keep=True)` only.
        """
        owner = self.stream_executor.owner
        for executor in list(owner.executors):
            executor.end()
        for executor in list(owner.executors):
            executor.drain()
        owner.close()

    def __del__(self) -> None:
        executor = getattr(self, "stream_executor", None)
        if executor is not None:
            executor.end()

    def __repr__(self) -> str:
        executor = self.stream_executor
        return f"State({executor.text_!r}{'' if executor.error_ is None else ', failed'})"

    # Helpers

    def forget_checkpoints(self) -> None:
        """Let go of this branch's checkpoints (those that the program holds stay)."""
        self._last, self._named = None, {}

    @property
    def checkpoints(self) -> Mapping[str, Checkpoint]:
        """This branch's named checkpoints."""
        return self._named

    def _queue(self, run: Any) -> None:
        self.stream_executor.submit(Step(run))

    def _settled_mark(self) -> tuple[Mark, Pin | None]:
        executor = self.stream_executor

        def run() -> tuple[Mark, Pin | None]:
            name = uuid.uuid4().hex
            pin = Pin(name, executor.owner.trash) if executor.settle(pin=name) else None
            return Mark.of(executor), pin

        settled: tuple[Mark, Pin | None] = executor.ask(run)
        return settled

    def _child(self, mark: Mark) -> State:
        ours = self.stream_executor
        executor = type(ours)(
            ours.backend,
            ours.owner,
            ours.arguments,
            ours.default_sampling_para,
            stream=ours.stream,
            use_thread=ours.use_thread,
            parent=ours,
        )
        mark.restore(executor)
        executor.fork_start_text_pos = len(mark.text)
        executor.frozen_depth, executor.locked_depth = ours.frozen_depth, ours.locked_depth
        child = type(self)(executor)
        child._last, child._named = self._last, dict(self._named)
        return child

    def _place(self, to: Place) -> Checkpoint:
        found = self._last if to is None else self._named.get(to) if isinstance(to, str) else to
        owner = self.stream_executor.owner
        if found is None:
            what = "there is no checkpoint" if to is None else f"no checkpoint is called {to!r}"
            raise RollbackBeyondRetention(what, owner=owner.name)
        if found.owner is not owner:
            raise ForeignOwner("the checkpoint belongs to another run", owner=owner.name)
        return found
