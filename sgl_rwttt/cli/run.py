"""``sgl-rwttt run``: run a program of a file, once or for every line of a batch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import FAILED, OK, CommandFailed, UsageError
from .parsers import Commands, api_key, is_shown, positive
from .programs import check_arguments, described, load_program, parse_arguments
from .rows import LineWriter, Row, failure, in_order, read_rows, success, write_line

if TYPE_CHECKING:
    from sgl_rwttt.lang import Program, StateBackend

    AnyProgram = Program[...]

DESCRIPTION = """\
Run a @function program of a Python file, on a server or on a model in this process.

  sgl-rwttt run chat.py:ask --arg question="What is a state?"
  sgl-rwttt run chat.py:ask --arg question=@question.txt --url http://127.0.0.1:30000 --stream
  sgl-rwttt run chat.py:ask --batch in.jsonl --out out.jsonl --url http://127.0.0.1:30000
  sgl-rwttt run chat.py:ask --arg question=x --trace

--arg takes JSON (n=3, tags='["a"]'), else the text as it stands; @FILE is the text of a file. In a
batch every line of the input is a JSON object of arguments, --arg holds for all lines, and a line
of the output is

  {"ok": true, "result": ..., "text": ..., "variables": {...},
   "state": {"version": ..., "position": ..., "state_id": ...}}
  {"ok": false, "error": {"type": ..., "message": ...}}

in the order of the input, written as soon as it and all lines before it are done.
"""


def add_parser(commands: Commands) -> None:
    """Add the subcommand to the main parser."""
    parser = commands.add_parser(
        "run",
        help="run a program of a file, once or for every line of a batch",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="sgl-rwttt run FILE.py:FUNCTION [options]",
    )
    add = parser.add_argument
    add("program", metavar="FILE.py:FUNCTION", help="a function decorated with @sgl_rwttt.function")
    add("--arg", metavar="NAME=VALUE", action="append", default=[], help="an argument (repeat it)")
    add("--batch", metavar="FILE", type=Path, help="run once per line: a JSON object of arguments")
    add("--out", metavar="FILE", type=Path, help="write JSON lines here (emptied first)")
    add("--json", action="store_true", help="print the JSON line instead of the text")
    add("--threads", metavar="N", type=positive, default=64, help="rows at a time (default: 64)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--url", help="a running server; default: the embedded model, in process")
    where.add_argument("--model", metavar="FOLDER", help="serve this checkpoint in process")
    add("--api-key", metavar="KEY", help="the server's key; default: $RWTTT_API_KEY")
    add(
        "--tokenizer", metavar="FOLDER", help="where the server's model path is not on this machine"
    )
    add("--state", metavar="NAME", help="start on a snapshot in the server's folder")
    add("--snapshot-dir", metavar="FOLDER", help="that folder, for a model in this process")
    add("--temperature", metavar="T", type=float, help="default of the program's gens")
    add("--max-tokens", metavar="N", type=positive, help="default of the program's gens")
    add("--stream", action="store_true", help="print the text as it grows")
    add("--trace", action="store_true", help="print what the program would do; no server is used")
    add("--quiet", action="store_true", help="no progress bar and no summary on stderr")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the program; everything that can be wrong beforehand is found before a model is."""
    _check(options)
    program = load_program(options.program)
    arguments = parse_arguments(options.arg)
    rows = [arguments]
    if options.batch is not None:
        lines = read_rows(options.batch)
        rows = [{**arguments, **row} for _, row in lines]
        for (number, _), row in zip(lines, rows, strict=True):
            _checked(program, row, f"{options.batch}, line {number}: ")
    else:
        _checked(program, arguments)
    if options.trace:
        return _trace(program, arguments)
    from sgl_rwttt.lang import set_default_backend

    extra = _extra(program, options)
    backend = _backend(options)
    set_default_backend(backend)  # for programs that run others
    try:
        if options.batch is not None:
            return _run_batch(program, rows, {**extra, "backend": backend}, options)
        return _run_once(program, arguments, {**extra, "backend": backend}, options)
    finally:
        set_default_backend(None)
        backend.shutdown()


def _check(options: argparse.Namespace) -> None:
    alone = ("stream", "trace", "json") if options.batch is not None else ()
    for name in alone:
        if getattr(options, name):
            raise UsageError(f"--{name} is for one run, not for a --batch")
    if options.url is not None and options.snapshot_dir is not None:
        raise UsageError("--snapshot-dir is for a model in this process; a server has its own")
    out = options.out
    if out is None:
        return
    if options.batch is not None and out.exists() and out.samefile(options.batch):
        raise UsageError(f"--out {out} is the --batch itself")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out} cannot be written: name a file in a folder that exists")


def _checked(program: AnyProgram, arguments: Row, where: str = "") -> None:
    try:
        check_arguments(program, arguments)
    except UsageError as error:
        raise UsageError(f"{where}{error}") from error


def _extra(program: AnyProgram, options: argparse.Namespace) -> dict[str, Any]:
    given = {
        "temperature": options.temperature,
        "max_new_tokens": options.max_tokens,
        "state": options.state,
    }
    extra = {name: value for name, value in given.items() if value is not None}
    taken = sorted(set(extra) & set(program.arg_names))
    if taken:
        raise UsageError(f"{taken[0]!r} is an argument of the program: give it with --arg")
    return extra


def _backend(options: argparse.Namespace) -> StateBackend:
    import sgl_rwttt as rw

    if options.url is None:
        more = {} if options.snapshot_dir is None else {"ttt_snapshot_dir": options.snapshot_dir}
        return rw.Engine(options.model, **more)
    return rw.Runtime(options.url, api_key=api_key(options), tokenizer_path=options.tokenizer)


def _trace(program: AnyProgram, arguments: Row) -> int:
    from sgl_rwttt.lang import TraceLimit

    try:
        trace = program.trace(**arguments)
    except TraceLimit as error:
        print(error.trace)
        raise CommandFailed(str(error)) from error
    print(trace)
    return OK if trace.error is None else FAILED


def _run_once(program: AnyProgram, arguments: Row, extra: Row, options: argparse.Namespace) -> int:
    file = Path(options.program.rpartition(":")[0])
    try:
        state = program.run(**arguments, **extra, stream=options.stream)
        if options.stream:
            for part in state.text_iter():
                print(part, end="", flush=True)
            print()
    except Exception as error:
        if options.out is not None:
            write_line(options.out, failure(error))
        raise CommandFailed(f"{options.program} raised {described(error, file)}") from error
    row = success(state)
    if options.out is not None:
        write_line(options.out, row)
    elif options.json:
        write_line(None, row)
    if not options.json:
        _show(state.text() if not options.stream else None, row, options.quiet)
    return OK


def _show(text: str | None, row: Row, quiet: bool) -> None:
    if text is not None:
        print(text)
    if row["result"] is not None:
        note = f" ({row['result_is']})" if "result_is" in row else ""
        print(f"result: {row['result']}{note}")
    if not quiet:
        point = row["state"]
        print(
            f"state: version {point['version']}, position {point['position']}, {point['state_id']}",
            file=sys.stderr,
        )


def _run_batch(
    program: AnyProgram, rows: list[Row], extra: Row, options: argparse.Namespace
) -> int:
    from tqdm import tqdm

    def one(row: Row) -> Row:
        try:
            return success(program.run(**row, **extra))
        except Exception as error:
            return failure(error)

    writer, failed = LineWriter(options.out), 0
    try:
        with tqdm(total=len(rows), unit="row", disable=not is_shown(options.quiet)) as bar:
            for row in in_order(one, rows, options.threads):
                writer.write(row)
                failed += not row["ok"]
                bar.update()
    finally:
        writer.close()
    if failed or not options.quiet:
        print(f"sgl-rwttt: {len(rows)} rows, {failed} failed", file=sys.stderr)
    return FAILED if failed else OK
