"""Rows of a batch: JSON lines in, JSON lines out, in the same order."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from .errors import UsageError

Row = dict[str, Any]
T = TypeVar("T")


def read_rows(path: Path) -> list[tuple[int, Row]]:
    """(line number, object) of every line that is not blank; UsageError naming a bad line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--batch: {path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{path}, line {number}: not an object of arguments, {line[:60]!r}")
        rows.append((number, row))
    return rows


def success(state: Any) -> Row:
    """What is written for a run that ended well; a result that is no JSON is written by repr."""
    variables = {name: _plain(value)[0] for name, value in state.stream_executor.variables.items()}
    result, is_json = _plain(state.ret_value)
    row: Row = {"ok": True, "result": result}
    if not is_json:
        row["result_is"] = f"repr of {type(state.ret_value).__name__}"
    point = {"version": state.version, "position": state.position, "state_id": state.state_id}
    return {**row, "text": state.text(), "variables": variables, "state": point}


def failure(error: BaseException) -> Row:
    """What is written for a run that failed."""
    return {"ok": False, "error": {"type": type(error).__name__, "message": str(error)}}


def _plain(value: Any) -> tuple[Any, bool]:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return repr(value), False
    return value, True


class LineWriter:
    """Appends whole lines to a file, or to standard output: one write call per line."""

    def __init__(self, path: Path | None) -> None:
        """Empties the file; raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        self._file = 1 if path is None else os.open(path, flags, 0o666)

    def write(self, row: Row) -> None:
        """Write one row; raises OSError."""
        line = json.dumps(row, ensure_ascii=False) + "\n"
        left = memoryview(line.encode("utf-8", "backslashreplace"))  # a JSON escape, too
        while left:  # once, unless the disk is full or it is a pipe
            left = left[os.write(self._file, left) :]

    def close(self) -> None:
        """Close the file; standard output stays open."""
        if self._file != 1:
            os.close(self._file)


def write_line(path: Path | None, row: Row) -> None:
    """Write one row to a file of its own, or to standard output."""
    writer = LineWriter(path)
    try:
        writer.write(row)
    finally:
        writer.close()


def in_order(run: Callable[[T], Row], items: Sequence[T], threads: int) -> Iterator[Row]:
    """`run` of every item, up to `threads` at a time, yielded in order as soon as possible.

    The threads are daemons: when the caller stops, nobody waits for those that still run.
    """
    todo: queue.SimpleQueue[tuple[T, Future[Row]]] = queue.SimpleQueue()
    futures: list[Future[Row]] = []
    for item in items:
        futures.append(Future())
        todo.put((item, futures[-1]))

    def work() -> None:
        while True:
            try:
                item, future = todo.get_nowait()
            except queue.Empty:
                return
            try:
                future.set_result(run(item))
            except BaseException as error:
                future.set_exception(error)

    for _ in range(min(threads, len(items))):
        threading.Thread(target=work, name="sgl-rwttt row", daemon=True).start()
    for future in futures:
        yield future.result()
