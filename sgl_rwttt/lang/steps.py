"""Small parts of the executor: a queued step, and an event that counts what it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from sglang.lang.ir import SglExpr, SglExprList, SglGen, SglSelect, SglVarScopeEnd

from .sampling import check_single


class Step(SglExpr):
    """A function that runs in its turn among the other expressions of a branch."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self.run = run
        self.done: Future[Any] = Future()

    def execute(self) -> None:
        """Run it and hand its result to who waits."""
        result = self.run()
        with suppress(InvalidStateError):  # its branch was cancelled meanwhile
            self.done.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Hand `error` to who waits, unless it has run."""
        with suppress(InvalidStateError):
            self.done.set_exception(error)


class Arrivals:
    """Set when everything that was expected has arrived; the interface of threading.Event.

    sglang.lang makes a fresh event each time a variable's name is used, so that a slow first
    use sets the event of the second.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._missing = 0

    def expect(self) -> None:
        """One more `set` must come before `wait` returns."""
        with self._changed:
            self._missing += 1

    def set(self) -> None:
        """One expected thing has arrived."""
        with self._changed:
            self._missing = max(self._missing - 1, 0)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Nothing will arrive any more."""
        with self._changed:
            self._missing = 0
            self._changed.notify_all()

    def is_set(self) -> bool:
        """Whether nothing is missing."""
        with self._changed:
            return self._missing == 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing is missing; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._missing == 0, timeout)


def variables_of(expr: Any) -> Iterator[str]:
    """Names of the variables that an expression sets, in order; refuses gen(n > 1)."""
    if isinstance(expr, SglExprList):
        for part in expr.expr_list:
            yield from variables_of(part)
    elif isinstance(expr, SglGen | SglSelect | SglVarScopeEnd):
        if isinstance(expr, SglGen):
            check_single(expr.sampling_params.n)
        if expr.name is not None:
            yield expr.name
