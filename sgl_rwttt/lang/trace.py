"""`Program.trace`: what a program would do, without a server.

The program runs through the real interpreter on a server that has no model, so what it prints is
what it would do, as far as that does not depend on what a model says: gens answer with a
placeholder, `[name]`, selects with the first choice, the first branch is the best. Python code of
the program (files, tools, tests of an answer) runs as it always does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.lang.ir import SglSamplingParams

from .owner import Owner
from .trace_log import Budget, Log, OutOfNodes, TraceNode, lines_of, shown
from .trace_state import Answers, TraceBackend, TraceExecutor, TraceState

__all__ = ["Trace", "TraceLimit", "TraceNode", "trace_program"]

NODES = 1000


@dataclass(frozen=True)
class Trace:
    """A traced run; `str(trace)` is the program as an indented list."""

    name: str
    arguments: dict[str, Any]
    nodes: tuple[TraceNode, ...]
    text: str  # of the context at the end, with the placeholders
    variables: dict[str, Any]
    ret_value: Any  # what the program returned
    error: Exception | None  # what it raised on the placeholders

    def __str__(self) -> str:
        given = ", ".join(f"{name}={shown(value)}" for name, value in self.arguments.items())
        lines = [f"{self.name}({given})", *lines_of(self.nodes, 1)]
        if self.error is not None:
            lines.append(f"  raises {type(self.error).__name__}: {self.error}")
        elif self.ret_value is not None:
            lines.append(f"  returns {shown(self.ret_value)}")
        return "\n".join(lines)


class TraceLimit(RuntimeError):
    """A traced program said more than a trace may hold; `trace` has what it said before."""

    def __init__(self, message: str, trace: Trace) -> None:
        super().__init__(message)
        self.trace = trace


def trace_program(
    func: Callable[..., Any],
    args: Sequence[Any],
    arguments: dict[str, Any],
    sampling: SglSamplingParams,
    nodes: int,
    answers: Answers | None,
) -> Trace:
    """Run `func` on a `TraceState`. Raises TraceLimit beyond `nodes` nodes, TypeError for arguments
    that do not fit; what the program itself raises is in the trace."""
    bound = inspect.signature(func).bind(None, *args, **arguments).arguments
    seen = dict(list(bound.items())[1:])
    said: list[TraceNode] = []
    backend = TraceBackend(answers)
    owner = Owner(backend.transport)
    executor = TraceExecutor(backend, owner, arguments, sampling, use_thread=False)
    executor.log = Log(said, Budget(nodes))
    state = TraceState(executor)

    def made(value: Any, error: Exception | None) -> Trace:
        variables = dict(executor.variables)
        return Trace(func.__name__, seen, tuple(said), executor.text_, variables, value, error)

    try:
        value = func(state, *args, **arguments)
    except OutOfNodes:
        message = (
            f"{func.__name__} said more than {nodes:,} nodes: if it repeats until an answer passes "
            "a test, give one that does (answers={'name': text}), else raise nodes="
        )
        raise TraceLimit(message, made(None, None)) from None
    except Exception as error:
        return made(None, error)
    finally:
        for each in list(owner.executors):
            each.end()
        owner.close()
    return made(value, None)
