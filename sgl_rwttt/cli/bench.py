"""``sgl-rwttt bench``: the benchmarks as tables, CSV files, plots and a page."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .bench_page import update
from .bench_parts import PARTS, chosen, scripts_folder
from .bench_record import Record
from .errors import FAILED, OK, UsageError
from .parsers import Commands, is_shown, positive
from .tables import table

BUSY = 1.0  # load average before the run
LIST, PAGE = "list", "page"

DESCRIPTION = """\
Run benchmarks one after the other, each script in a process of its own.

  sgl-rwttt bench list                          the parts, with estimates
  sgl-rwttt bench all --out results             everything; hours
  sgl-rwttt bench serving scaling --out results
  sgl-rwttt bench all --out results --resume    go on after an interruption
  sgl-rwttt bench page --from results --page docs/benchmarks.md

DIR gets, per script, NAME.md (what it printed), NAME.json (every measurement), NAME-1.csv, ... (its
tables), its plots as PNG and NAME.log (its stderr). A script that fails is reported and the others
go on; the status is then 1.
"""


def add_parser(commands: Commands) -> None:
    """Add the subcommand to the main parser."""
    parser = commands.add_parser(
        "bench",
        help="run the benchmarks and write tables, plots and a page",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="sgl-rwttt bench all|list|page|PART ... [options]",
    )
    add = parser.add_argument
    add("parts", metavar="all|list|page|PART", nargs="+", help="what to run, or what to do")
    add("--out", metavar="DIR", type=Path, help="folder of the results, new or empty")
    add("--resume", action="store_true", help="go on in a folder with results: run what is missing")
    add("--quick", action="store_true", help="toy sizes: does it run? The numbers mean nothing")
    add("--threads", metavar="N", type=positive, help="OMP_NUM_THREADS of every script")
    add("--page", metavar="FILE", type=Path, help="put the results into this Markdown page")
    add("--from", metavar="DIR", type=Path, dest="source", help="results for the word `page`")
    add("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Do what the words say; 1 when a script failed."""
    words = options.parts
    for word in (LIST, PAGE):
        if word in words and len(words) > 1:
            raise UsageError(f"`bench {word}` takes no other parts")
    if words == [LIST]:
        print(listing())
        return OK
    if words == [PAGE]:
        if options.source is None or options.page is None:
            raise UsageError("`bench page` needs --from DIR and --page FILE")
        _page(options.page, options.source)
        return OK
    if options.source is not None:
        raise UsageError("--from goes with the word `page`; a run writes to --out")
    return _run(options)


def listing() -> str:
    """The parts with their scripts and estimates."""
    rows = [
        [round(part.minutes), part.name, " ".join(s.name for s in part.scripts), part.shows]
        for part in PARTS
    ]
    return table(("minutes", "part", "scripts", "what it shows"), rows)


def _run(options: argparse.Namespace) -> int:
    parts = chosen(options.parts, PARTS)
    if options.out is None:
        raise UsageError("name a folder for the results: --out DIR")
    if options.page is not None and options.quick:
        raise UsageError("--page is not for --quick, whose numbers mean nothing")
    if options.page is not None and not options.page.is_file():
        raise UsageError(f"--page {options.page} is no file")
    from .bench_process import terminated_as_interrupted
    from .bench_runs import run_parts

    scripts = scripts_folder()
    threads = options.threads or _default_threads()
    record = Record.begin(options.out, options.quick, threads, options.resume)
    options.out.mkdir(parents=True, exist_ok=True)
    record.write(options.out)
    _warn_of_load()
    with terminated_as_interrupted():
        results = run_parts(parts, scripts, options.out, record, is_shown(options.quiet))
    rows = [(each.minutes, each.part, each.script, each.outcome) for each in results]
    print(table(("minutes", "part", "script", "outcome"), rows))
    if options.page is not None:
        _page(options.page, options.out)
    return OK if all(each.is_good for each in results) else FAILED


def _default_threads() -> int:
    from sgl_rwttt.srt_ext.launch import physical_cores

    return int(os.environ.get("OMP_NUM_THREADS") or physical_cores())


def _warn_of_load() -> None:
    load = os.getloadavg()[0]
    if load > BUSY:
        print(
            f"sgl-rwttt: warning: the load average is {load:.1f}: something else is running, and "
            "times and ratios will suffer",
            file=sys.stderr,
        )


def _page(page: Path, folder: Path) -> None:
    put, without = update(page, folder)
    print(f"{page}: {', '.join(put) or 'nothing'} replaced", file=sys.stderr)
    if without:
        print(f"{page} has no block for {', '.join(without)}", file=sys.stderr)
