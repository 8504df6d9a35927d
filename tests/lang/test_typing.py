"""The types that a user sees: `mypy --strict` on programs that import the installed package."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sgl_rwttt as rw
from sgl_rwttt.lang import upstream

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "tests" / "data" / "typing"
INTERNAL = {"forget_checkpoints", "mark", "pin", "src_state", "states", "stream_executor"}


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[tuple[int, str]]]:
    """(line, error code) by file name, from one run of mypy without any configuration."""
    folder = tmp_path_factory.mktemp("typing")
    sources = [*SOURCES.glob("*.py"), *(ROOT / "examples").glob("*.py")]
    for source in sources:
        (folder / source.name).write_bytes(source.read_bytes())
    names = [source.name for source in sources]
    options = ["--strict", "--config-file=", "--cache-dir", str(folder / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *names],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, set[tuple[int, str]]] = {name: set() for name in names}
    for name, line, code in re.findall(
        r"^([\w.]+):(\d+): error: .*\[([\w-]+)\]$", done.stdout, re.MULTILINE
    ):
        found[name].add((int(line), code))
    return found


def expected(source: Path) -> set[tuple[int, str]]:
    lines = source.read_text("utf-8").splitlines()
    marked = ((i, re.search(r"  # ([\w-]+)$", line)) for i, line in enumerate(lines, 1))
    return {(i, found.group(1)) for i, found in marked if found}


@pytest.mark.slow
def test_a_users_program_and_the_examples_pass(
    complaints: dict[str, set[tuple[int, str]]],
) -> None:
    """Guards: a public name without a type, or with one that its ordinary use does not fit."""
    assert len(complaints) > 8
    assert {name: found for name, found in complaints.items() if found}.keys() <= {"wrong.py"}


@pytest.mark.slow
def test_wrong_calls_are_rejected(complaints: dict[str, set[tuple[int, str]]]) -> None:
    """Guards: a public name that is Any to mypy and lets everything through."""
    marked = expected(SOURCES / "wrong.py")
    assert len(marked) > 25
    assert complaints["wrong.py"] == marked


def is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def members(cls: type) -> set[str]:
    """Public names that this package gives to a class."""
    ours = [each for each in cls.__mro__ if each.__module__.startswith("sgl_rwttt.")]
    return {name for each in ours for name in vars(each) if not name.startswith("_")}


def test_the_users_program_uses_everything() -> None:
    """Guards: a new public name whose types nobody tries."""
    nodes = list(ast.walk(ast.parse((SOURCES / "user.py").read_text("utf-8"))))
    said = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    said |= {node.id for node in nodes if isinstance(node, ast.Name)}
    others = {"__version__", "image"}  # images are refused: the served rules read text only
    others |= {name for name in rw.__all__ if is_error(getattr(rw, name))}
    assert set(rw.__all__) - others <= said
    for cls in (rw.State, rw.Branches, rw.Program, rw.Checkpoint, rw.Score, rw.Lineage):
        assert members(cls) - INTERNAL <= said, cls


def stubs() -> dict[str, ast.FunctionDef]:
    """Functions of upstream.pyi by qualified name, of overloads the last."""
    tree = ast.parse(Path(upstream.__file__).with_suffix(".pyi").read_text("utf-8"))
    found: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        body = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + each.name: each for each in body if isinstance(each, ast.FunctionDef)}
    return found


@pytest.mark.parametrize("name", stubs())
def test_the_stub_is_true(name: str) -> None:
    """Guards: a stub that tells of another sglang.lang than the installed one."""
    value: Any = upstream
    for part in name.split("."):
        value = getattr(value, part)
    arguments = stubs()[name].args
    if isinstance(value, property):
        return
    real = inspect.signature(value).parameters.values()
    assert [each.arg for each in [*arguments.args, *arguments.kwonlyargs]] == [
        each.name for each in real
    ]
    optional = [each for each in real if each.default is not inspect.Parameter.empty]
    given = [*arguments.defaults, *(each for each in arguments.kw_defaults if each)]
    is_overload = bool(stubs()[name].decorator_list)
    assert is_overload or len(given) == len(optional)


def test_the_stub_names_everything() -> None:
    """Guards: a name that is there at run time and unknown to mypy, or the other way round."""
    tree = ast.parse(Path(upstream.__file__).with_suffix(".pyi").read_text("utf-8"))
    named = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    named |= {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert named == set(upstream.__all__)
