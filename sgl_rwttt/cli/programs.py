"""``prog.py:fn``: the program that a command line names, and the arguments that it is given."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .errors import CommandFailed, UsageError

if TYPE_CHECKING:
    from sgl_rwttt.lang import Program


def load_program(spec: str) -> Program[...]:
    """Import a file and return its program.

    The file's folder comes first on the import path, as when Python runs it. Raises UsageError for
    a name that is not a program's, CommandFailed when the file cannot be imported.
    """
    from sgl_rwttt.lang import Program

    file, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file!r}: name a program as FILE.py:FUNCTION")
    module = _imported(path)
    programs = [key for key, value in vars(module).items() if isinstance(value, Program)]
    listed = ", ".join(f"{file}:{each}" for each in programs)
    listed = listed or "none: decorate a function with @sgl_rwttt.function"
    if not name:
        raise UsageError(f"say which program of {file}: {listed}")
    found = getattr(module, name, None)
    if isinstance(found, Program):
        return found
    what = "has no" if found is None else "has no program"
    raise UsageError(f"{file} {what} {name!r}; its programs: {listed}")


def _imported(path: Path) -> ModuleType:
    path = path.resolve()
    sys.path.insert(0, str(path.parent))
    is_taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    name = f"program_{path.stem}" if is_taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CommandFailed(f"{path.name} cannot be imported: {described(error, path)}") from error
    return module


def described(error: BaseException, path: Path | None = None) -> str:
    """Type and message of an exception, and the last line of `path` that it went through."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if path is None:
        return text
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    return f"{text} ({path.name}, line {lines[-1]})" if lines else text


def parse_arguments(given: Iterable[str]) -> dict[str, Any]:
    """Arguments from ``k=v``: JSON when v is JSON, the text of a file for ``@file``, else v.

    Raises UsageError.
    """
    arguments: dict[str, Any] = {}
    for each in given:
        name, found, value = each.partition("=")
        if not found or not name:
            raise UsageError(f"--arg {each!r}: write NAME=VALUE, or NAME=@FILE for a file's text")
        if name in arguments:
            raise UsageError(f"--arg {name} is given twice")
        arguments[name] = _text(Path(value[1:])) if value.startswith("@") else _value(value)
    return arguments


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--arg: {path} cannot be read: {error}") from error


def check_arguments(program: Program[...], arguments: Mapping[str, Any]) -> None:
    """Raise UsageError unless the program can be called with these arguments."""
    signature = inspect.signature(program.func)
    try:
        signature.bind(None, **{**arguments, **program.bind_arguments})
    except TypeError as error:
        names = ", ".join(program.arg_names) or "none"
        raise UsageError(f"{program.func.__name__}: {error}; its arguments: {names}") from error
