"""Renders the reference part of docs/lang.md from signatures and docstrings.

    python docs/reference.py          # rewrites the part between the markers

A test fails while the page differs from what this renders.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sgl_rwttt as rw
from sgl_rwttt.lang import upstream

PAGE = Path(__file__).with_name("lang.md")
BEGIN, END = "<!-- reference: begin -->", "<!-- reference: end -->"
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Programs", ("function", "Program", "ProgramFailed")),
    ("State", ("State", "Branches", "Checkpoint")),
    ("Backends", ("Engine", "Runtime", "StateBackend", "set_default_backend")),
    ("Results", ("Score", "Lineage", "Event", "tree", "Trace", "TraceLimit")),
)
INHERITED = {"State": "ProgramState", "StateBackend": "BaseBackend"}
HIDDEN = {"forget_checkpoints", "mark", "pin", "src_state", "states", "stream_executor"}
LOWERING = {"commit", "generate", "generate_stream", "select", "score"}  # of the backend
SPECIAL = ("__call__", "__iadd__")


def render() -> str:
    """The reference as Markdown."""
    parts: list[str] = []
    for title, names in GROUPS:
        parts.append(f"### {title}")
        for name in names:
            parts += entry(name, getattr(rw, name))
    parts += ["### Expressions", EXPRESSIONS, *expressions()]
    parts += ["### Errors", *errors()]
    return "\n\n".join(parts)


def entry(name: str, value: Any) -> Iterator[str]:
    """A function, or a class with its members."""
    if not inspect.isclass(value):
        yield f"**`rw.{name}{signature(value)}`**"
        yield doc(value)
        return
    has_own = "__init__" in vars(value) and name in ("Engine", "Runtime")
    yield f"#### `{name}`"
    if has_own:
        yield f"`rw.{name}{signature(value)}`"
    yield doc(value)
    rows = [*fields(value), *members(name, value)]
    if rows:
        yield "\n".join(rows)
    if name in INHERITED:
        inherited = ", ".join(f"`{each}`" for each in stub_members(INHERITED[name]))
        if name == "State":
            yield f"From sglang.lang, unchanged: {inherited}."


def fields(cls: type) -> Iterator[str]:
    """Fields of a dataclass with the comments behind them."""
    if not dataclasses.is_dataclass(cls):
        return
    said = dict(re.findall(r"^    (\w+): [^#\n]+?  # (.*)$", inspect.getsource(cls), re.MULTILINE))
    for each in dataclasses.fields(cls):
        if each.name not in HIDDEN:
            comment = f": {said[each.name]}" if each.name in said else ""
            yield f"- `.{each.name}: {each.type}`{comment}"


def members(name: str, cls: type) -> Iterator[str]:
    """Methods and properties that this package gives to a class, in the order of the source."""
    seen = (
        {each.name for each in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    )
    for base in cls.__mro__:
        if not base.__module__.startswith("sgl_rwttt."):
            continue
        if name in ("Engine", "Runtime") and base.__name__ == "StateBackend":
            continue
        for key, value in vars(base).items():
            if key in seen | HIDDEN or (key.startswith("_") and key not in SPECIAL):
                continue
            if name == "StateBackend" and key in LOWERING:
                continue
            seen.add(key)
            if isinstance(value, property):
                yield f"- `.{key}: {annotation(value.fget)}`. {doc(value)}"
            elif inspect.isfunction(value) or isinstance(value, classmethod | staticmethod):
                yield f"- `{call(cls, key)}`. {doc(value)}"


def call(cls: type, name: str) -> str:
    """How a method is called."""
    value = getattr(cls, name)
    if name == "__call__":
        return "program(...) -> State"
    if name == "__iadd__":
        return f"branches += {signature(value)[1:].partition(')')[0]}"
    return f".{name}{signature(value)}"


def signature(value: Any) -> str:
    """Parameters without `self`, annotations without quotes."""
    found = inspect.signature(value)
    kept = [each for each in found.parameters.values() if each.name != "self"]
    text = re.sub(r"""(: |-> )(["'])(.*?)\2""", r"\1\3", str(found.replace(parameters=kept)))
    if hasattr(value, "__wrapped__"):  # of contextlib
        text = re.sub(r"-> Iterator\[(\w+)\]", r"-> context manager of \1", text)
    return text


def annotation(value: Any) -> str:
    """What a property returns."""
    return str(inspect.signature(value).return_annotation)


def doc(value: Any) -> str:
    """The docstring, one line per paragraph."""
    paragraphs = (inspect.getdoc(value) or "").split("\n\n")
    return "\n\n".join(" ".join(part.split()) for part in paragraphs).replace("\n\n", " ")


def stub() -> ast.Module:
    """The types of sglang.lang."""
    return ast.parse(Path(upstream.__file__).with_suffix(".pyi").read_text("utf-8"))


def stub_members(name: str) -> list[str]:
    """Public methods of a class in the stub."""
    [found] = [n for n in stub().body if isinstance(n, ast.ClassDef) and n.name == name]
    names = (n.name for n in found.body if isinstance(n, ast.FunctionDef))
    return list(dict.fromkeys(n for n in names if n != "__init__"))


def expressions() -> Iterator[str]:
    """Signatures of the functions that make expressions."""
    lines: list[str] = []
    for node in stub().body:
        if isinstance(node, ast.FunctionDef) and node.name in rw.__all__:
            parameters = re.sub(r"(\w|\])=", r"\1 = ", ast.unparse(node.args))
            lines.append(f"- `{node.name}({parameters})`")
    yield "\n".join(lines)


EXPRESSIONS = (
    "sglang.lang's own, unchanged. They return a `SglExpr`; expressions and strings are joined "
    "with `+`. `image` and `n` above 1 are refused. A `choices_method` is "
    "`token_length_normalized`, `greedy_token_selection` or `unconditional_likelihood_normalized`."
)


def errors() -> Iterator[str]:
    """The errors with their HTTP status."""
    rows = ["| error | HTTP | |", "|---|---|---|"]
    for name in sorted(rw.__all__):
        value = getattr(rw, name)
        if inspect.isclass(value) and issubclass(value, rw.StateError):
            rows.append(f"| `{name}` | {value.http_status} | {doc(value)} |")
    yield "\n".join(rows)


def page(text: str) -> str:
    """`text` with the reference renewed."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{render()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
