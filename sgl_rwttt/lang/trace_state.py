"""The state that a traced program receives: the real one, with a log."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang.lang.ir import SglGen, SglSamplingParams, SglSelect

from .answer import Score
from .backend import StateBackend
from .branches import Branches, Key
from .checkpoint import Checkpoint
from .executor import StateExecutor
from .ledger import Cursor
from .owner import Owner
from .state import Place, State
from .steps import Step
from .trace_log import ROLES, Log, arguments, shown
from .trace_server import TraceTransport

Answers = Mapping[str, str | Sequence[str]]
_TYPED = {"int": "0", "float": "0.0", "bool": "True", "str": '""'}


class TraceBackend(StateBackend):
    """The real lowering, on a server without a model."""

    transport: TraceTransport

    def __init__(self, answers: Answers | None) -> None:
        super().__init__(TraceTransport(), "chatml")
        self._answers = {
            name: [given] if isinstance(given, str) else list(given)
            for name, given in (answers or {}).items()
        }

    def answer(self, name: str | None, params: SglSamplingParams) -> str:
        """The next given answer of that name (the last one stays), else a placeholder."""
        given = self._answers.get(name or "")
        if given:
            return given.pop(0) if len(given) > 1 else given[0]
        dtype = getattr(params.dtype, "__name__", params.dtype)
        return _TYPED.get(str(dtype), f"[{name or 'gen'}]")

    def select(
        self, owner: Owner, cursor: Cursor, choices: Sequence[str], method: ChoicesSamplingMethod
    ) -> tuple[ChoicesDecision, list[int]]:
        """The choice that was given as an answer, else the first one."""
        decision, _ = super().select(owner, cursor, choices, method)
        wanted = self.transport.answer
        chosen = wanted if wanted in choices else choices[0]
        return dataclasses.replace(decision, decision=chosen), self.text.encode(chosen, False)


class TraceExecutor(StateExecutor):
    """Logs what is submitted, then runs it."""

    backend: TraceBackend
    log: Log | None = None

    def submit(self, expr: Any) -> None:
        """Log an expression and run it at once."""
        if self.log is not None and not isinstance(expr, Step):
            self.log.expression(expr)
        super().submit(expr)

    def _execute_gen(self, expr: SglGen) -> None:
        self.backend.transport.answer = self.backend.answer(expr.name, expr.sampling_params)
        super()._execute_gen(expr)

    def _execute_select(self, expr: SglSelect) -> None:
        given = self.backend.answer(expr.name, SglSamplingParams())
        self.backend.transport.answer = given
        super()._execute_select(expr)


class TraceState(State):
    """Logs the verbs, then does them."""

    stream_executor: TraceExecutor

    def __init__(self, stream_executor: TraceExecutor) -> None:
        super().__init__(stream_executor)
        self._number: int | None = None  # among the branches of its fork
        self._scratch: str | None = None  # the verb that is about to fork a branch for itself
        self._labels: weakref.WeakKeyDictionary[Checkpoint, str] = weakref.WeakKeyDictionary()

    @property
    def log(self) -> Log:
        """The log of this branch."""
        assert self.stream_executor.log is not None
        return self.stream_executor.log

    # Branching

    def fork(self, size: int = 1, at: Place = None) -> TraceBranches:
        """As in State; the branches log into the fork."""
        scratch, self._scratch = self._scratch, None
        detail = f"{size}" + ("" if at is None else f" at {self._label(at)}")
        node = self.log.add(scratch or "fork", "" if scratch else detail)
        found = super().fork(size, at)
        for i, child in enumerate(found.states):
            assert isinstance(child, TraceState)
            child._number = i
            child._labels = self._labels
            child.stream_executor.log = self.log.branch(node, None if scratch else str(i))
        return TraceBranches(found.states, self, found._pin)

    def keep(self, branch: State) -> None:
        """As in State."""
        number = getattr(branch, "_number", None)
        self.log.add("keep", "" if number is None else f"branch {number}")
        super().keep(branch)
        self._close_roles()

    @contextmanager
    def peek(self) -> Iterator[State]:
        """As in State."""
        self._scratch = "peek"
        with super().peek() as scratch:
            yield scratch

    @contextmanager
    def copy(self, position_ids_offset: Any = None) -> Iterator[State]:
        """As in State."""
        self._scratch = "copy"
        with super().copy(position_ids_offset) as scratch:
            yield scratch

    # Places and modes

    def checkpoint(self, name: str | None = None) -> Checkpoint:
        """As in State."""
        label = f"#{len(self._labels) + 1}" if name is None else repr(name)
        self.log.add("checkpoint", label)
        made = super().checkpoint(name)
        self._labels[made] = label
        return made

    def rollback(self, to: Place = None) -> None:
        """As in State."""
        self.log.add("rollback", f"to {self._label(to)}")
        super().rollback(to)
        self._close_roles()

    def freeze(self) -> None:
        """As in State."""
        self.log.add("frozen", opens=True)
        super().freeze()

    def unfreeze(self) -> None:
        """As in State."""
        self.log.close("frozen")
        super().unfreeze()

    # Verbs that stand alone

    def adapt(self, *args: Any, **kwargs: Any) -> None:
        """As in State."""
        self._say("adapt", args, kwargs)
        super().adapt(*args, **kwargs)

    def clear_context(self, *args: Any, **kwargs: Any) -> None:
        """As in State."""
        self._say("clear_context", args, kwargs)
        super().clear_context(*args, **kwargs)

    def flush(self) -> None:
        """As in State."""
        self._say("flush")
        super().flush()

    def commit(self) -> None:
        """As in State."""
        self._say("commit")
        super().commit()

    def snapshot(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in State; no file is written."""
        self._say("snapshot", args, kwargs)
        return super().snapshot(*args, **kwargs)

    def restore(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in State; no file is read."""
        self._say("restore", args, kwargs)
        answer = super().restore(*args, **kwargs)
        self._close_roles()
        return answer

    def score(self, *args: Any, **kwargs: Any) -> Score:
        """As in State; every token has the log-probability -1."""
        self._say("score", args, kwargs)
        return super().score(*args, **kwargs)

    def release(self) -> None:
        """As in State."""
        self._say("release")
        super().release()

    # Helpers

    def _say(self, verb: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}) -> None:
        words = [*map(shown, args), *([arguments(kwargs.items())] if kwargs else [])]
        self.log.add(verb, ", ".join(words))

    def _label(self, to: Place) -> str:
        if isinstance(to, Checkpoint):
            return self._labels.get(to, "a checkpoint")
        return "the last checkpoint" if to is None else repr(to)

    def _close_roles(self) -> None:
        if self.stream_executor.cur_role is None:
            self.log.close(*ROLES)


class TraceBranches(Branches):
    """Branches whose answers are all alike: the first ones are the best."""

    def best(self, key: Key) -> State:
        """The first branch; a function as `key` is not called."""
        self._say("best", key)
        return self.states[0]

    def prune(self, key: Key, keep: int = 1) -> Branches:
        """Keep the first branches; a function as `key` is not called."""
        self._say("prune", key, f", keep={keep}")
        places = {id(state): -i for i, state in enumerate(self.states)}
        return super().prune(lambda state: places[id(state)], keep)

    def join(self, *args: Any, **kwargs: Any) -> None:
        """As in Branches."""
        self._say("join")
        super().join(*args, **kwargs)

    def _say(self, verb: str, key: Key | None = None, more: str = "") -> None:
        named = (
            repr(key) if isinstance(key, str) else f"by {getattr(key, '__name__', 'a function')}"
        )
        parent = self.src_state
        assert isinstance(parent, TraceState)
        parent.log.add(verb, "" if key is None else named + more)
