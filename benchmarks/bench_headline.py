"""The headline ratios in one table, at a reduced size that still means something.

Runs bench_table.py and bench_overhead.py with fewer tokens, rows and rounds. With `--from DIR` the
reports of a full run are taken (DIR/bench_table.json, DIR/bench_overhead.json), and what is not
there is measured. Both sides of a ratio are of one report.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_overhead
import bench_table
from common import (
    command_line,
    machine,
    machine_line,
    markdown_table,
    new_parser,
    parse_sizes,
    run,
)
from table_report import rate, shown

TABLE_ROWS = (
    *("serial", "full", "bursty", "siblings", "replicas", "all-update"),
    *("stock", "stock siblings"),
)
TABLE_SIZE = ("--prompt", "128", "--decode", "33", "--repeats", "1", "--serial-streams", "2")


@dataclass(frozen=True)
class Source:
    """A benchmark that ratios are taken from, with its flags at reduced and at toy size."""

    script: ModuleType
    reduced: tuple[str, ...]
    quick: tuple[str, ...]


SOURCES = {
    "bench_table": Source(
        bench_table, (*TABLE_SIZE, "--only", *TABLE_ROWS), ("--quick", "--only", "full", "stock")
    ),
    "bench_overhead": Source(
        bench_overhead, ("--prompt", "128", "--decode", "33", "--rounds", "4"), ("--quick",)
    ),
}


@dataclass(frozen=True)
class Ratio:
    """One line: a row of bench_table.py over another one, and what is aimed at."""

    title: str
    row: str
    over: str
    at_least: float | None = None


RATIOS = (
    Ratio("full over serial", "full", "serial", 9.31),
    Ratio("full over serial replicas", "full", "replicas", 3.44),
    Ratio("full over stock without TTT", "full", "stock", 0.95),
    Ratio("bursty-update over uniform", "bursty", "full", 0.95),
    Ratio("all-update over uniform", "all-update", "full", 0.95),
    Ratio("sibling forks over streams of their own", "siblings", "full"),
    Ratio("sibling forks over stock's", "siblings", "stock siblings"),
)


MOST_OVERHEAD = 0.014
OTHERS = {"eager": "the eager loop's", "stock": "stock's"}


def report_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """A report that is there already, else a new one."""
    source, file = SOURCES[name], (options.source or Path()) / f"{name}.json"
    if options.source is not None and file.is_file():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    flags = source.quick if options.quick else source.reduced
    given = [*flags, "--threads", str(options.threads)]
    print(f"{name} {' '.join(given)}", file=sys.stderr, flush=True)
    made: dict[str, Any] = source.script.measure(source.script.parse(given), given)
    return made


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """The reports of all sources; the report that `render` prints and `--out` stores."""
    return {
        "benchmark": "headline",
        "machine": machine(options.threads),
        "command": command_line(__file__, arguments, options.threads),
        "quick": options.quick,
        "sources": {name: report_of(name, options) for name in SOURCES},
    }


def throughput(rows: dict[str, Any]) -> list[list[str]]:
    """Lines of bench_table.py; a ratio with a side that was not measured is left out."""
    found = []
    for ratio in RATIOS:
        if ratio.row in rows and ratio.over in rows:
            value = rate(rows[ratio.row]).over(rate(rows[ratio.over]))
            aim, met = "-", "-"
            if ratio.at_least is not None:
                aim, met = f">= {ratio.at_least}", answer(value.median >= ratio.at_least)
            found.append([ratio.title, shown(value, ".2f"), aim, met])
    return found


def overhead(report: dict[str, Any]) -> list[list[str]]:
    """Lines of bench_overhead.py: what ours takes more for a decode step with one stream."""
    found = []
    for other in bench_overhead.OTHERS:
        values = bench_overhead.differences(report, other, "decode")
        mean, error = bench_overhead.mean_error(values)
        title = f"time of a decode step with one stream, more than {OTHERS[other]}"
        met = answer(mean <= MOST_OVERHEAD)
        found.append([title, f"{mean:+.1%} +- {error:.1%}", f"<= {MOST_OVERHEAD:.1%}", met])
    return found


def answer(is_met: bool) -> str:
    """The last column."""
    return "yes" if is_met else "no"


def render(report: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    sources = report["sources"]
    toy = " Toy size: the numbers mean nothing." if report["quick"] else ""
    commands = "\n".join(f"- `{source['command']}`" for source in sources.values())
    rows, one = throughput(sources["bench_table"]["rows"]), sources["bench_overhead"]
    return "\n\n".join(
        [
            f"{machine_line(report['machine'])}\n\n`{report['command']}`",
            f"From the reports of\n\n{commands}",
            f"Ratios of decode tokens/s; differences with their standard errors.{toy}",
            markdown_table(["what", "value", "aim", "met"], [*rows, *overhead(one)]),
        ]
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; SystemExit for wrong usage."""
    parser = new_parser(__doc__)
    parser.add_argument("--from", type=Path, dest="source", metavar="DIR", help="take reports here")
    options = parse_sizes(parser, arguments, {}, {})
    if options.threads < 1:
        parser.error("--threads must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if asked to."""
    return run(arguments, parse, measure, render)


if __name__ == "__main__":
    main()
