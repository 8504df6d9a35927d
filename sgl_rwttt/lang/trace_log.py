"""What a traced program said, as a tree: one log per branch, one budget for all of them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sglang.lang.ir import (
    SglConstantText,
    SglExprList,
    SglGen,
    SglRoleBegin,
    SglRoleEnd,
    SglSelect,
    SglVariable,
    SglVarScopeBegin,
    SglVarScopeEnd,
)

_INDENT = "  "
_SHOWN = 60  # characters of a text
ROLES = ("system", "user", "assistant")


class OutOfNodes(BaseException):
    """Ends a traced program that says too much; no `except Exception` of it can hold this up."""


@dataclass
class TraceNode:
    """One thing that the program said, and what it said inside of it."""

    what: str  # "fill", "gen", "select", "fork", "branch", a role, or the name of a verb
    detail: str
    children: list[TraceNode] = field(default_factory=list)

    def lines(self, depth: int = 0) -> Iterator[str]:
        """The node and its children, indented; equal neighbouring branches are shown once."""
        yield f"{_INDENT * depth}{self.what} {self.detail}".rstrip()
        yield from lines_of(self.children, depth + 1)


def lines_of(nodes: Iterable[TraceNode], depth: int) -> Iterator[str]:
    """Lines of neighbouring nodes."""

    def body(node: TraceNode) -> object:
        return tuple(lines_of(node.children, 0)) if node.what == "branch" else id(node)

    for _, group in itertools.groupby(nodes, body):
        first, *others = group
        if others:
            first = TraceNode("branches", f"{first.detail} to {others[-1].detail}", first.children)
        yield from first.lines(depth)


class Budget:
    """How many nodes a trace may have."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def spend(self) -> None:
        """One more node; raises OutOfNodes beyond the limit."""
        if self.used >= self.limit:
            raise OutOfNodes
        self.used += 1


class Log:
    """The nodes of one branch. Roles, frozen regions and variable scopes are open until closed."""

    def __init__(self, nodes: list[TraceNode], budget: Budget) -> None:
        self.budget = budget
        self._open = [TraceNode("", "", nodes)]

    def add(self, what: str, detail: str = "", opens: bool = False) -> TraceNode:
        """Append a node; with `opens`, what follows goes inside of it until `close(what)`."""
        self.budget.spend()
        node = TraceNode(what, detail)
        self._open[-1].children.append(node)
        if opens:
            self._open.append(node)
        return node

    def close(self, *kinds: str) -> None:
        """End the innermost open node of one of these kinds, and what is open inside of it."""
        for i in range(len(self._open) - 1, 0, -1):
            if self._open[i].what in kinds:
                del self._open[i:]
                return

    def branch(self, node: TraceNode, name: str | None) -> Log:
        """The log of a child: a branch `name` inside `node`, or `node` itself."""
        if name is None:
            return Log(node.children, self.budget)
        inside = TraceNode("branch", name)
        node.children.append(inside)
        return Log(inside.children, self.budget)

    def expression(self, expr: Any) -> None:
        """What `s += expr` says."""
        if isinstance(expr, str):
            self.add("fill", quoted(expr))
        elif isinstance(expr, SglExprList):
            for part in expr.expr_list:
                self.expression(part)
        elif isinstance(expr, SglConstantText):
            self.add("fill", quoted(expr.value))
        elif isinstance(expr, SglGen):
            self.add("gen", _join(expr.name, _given(expr)))
        elif isinstance(expr, SglSelect):
            self.add("select", _join(expr.name, [("choices", list(expr.choices))]))
        elif isinstance(expr, SglVariable):
            self.add("fill", f"with the variable {expr.name!r} of another branch")
        else:
            self._scope(expr)

    def _scope(self, expr: Any) -> None:
        if isinstance(expr, SglRoleBegin):
            self.add(expr.role, opens=True)
        elif isinstance(expr, SglRoleEnd):
            self.close(expr.role)
        elif isinstance(expr, SglVarScopeBegin):
            self.add("variable", repr(expr.name), opens=True)
        elif isinstance(expr, SglVarScopeEnd):
            self.close("variable")
        else:
            self.add(type(expr).__name__)


def quoted(text: str) -> str:
    """A text on one line, with its length when it is shown shortened."""
    if len(text) <= _SHOWN:
        return repr(text)
    return f"{text[:_SHOWN]!r}... ({len(text)} characters)"


def arguments(given: Iterable[tuple[str, Any]]) -> str:
    """Keyword arguments as they would be written."""
    return ", ".join(f"{name}={shown(value)}" for name, value in given)


def shown(value: Any) -> str:
    """A value on one line."""
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, type):
        return value.__name__
    text = repr(value)
    return text if len(text) <= 2 * _SHOWN else f"{text[: 2 * _SHOWN]}..."


def _given(expr: SglGen) -> list[tuple[str, Any]]:
    params = expr.sampling_params
    fields = [(f.name, getattr(params, f.name)) for f in dataclasses.fields(params)]
    return [(name, value) for name, value in fields if value is not None]


def _join(name: str | None, given: Iterable[tuple[str, Any]]) -> str:
    parts = ["" if name is None else repr(name), arguments(given)]
    return " ".join(part for part in parts if part)
