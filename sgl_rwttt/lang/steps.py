"""Small parts of the executor: a queued step, and an event that counts what it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from sglang.lang.ir import SglExpr, SglExprList, SglGen, SglSelect, SglVarScopeBegin

from .sampling import check_single


class Step(SglExpr):
    """A function that runs in its turn among the other expressions of a branch."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self.run = run
        self.done: Future[Any] = Future()


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
    elif isinstance(expr, SglGen | SglSelect | SglVarScopeBegin):
        if isinstance(expr, SglGen):
            check_single(expr.sampling_params.n)
        if expr.name is not None:
            yield expr.name
