"""What the benchmarks share: the machine line, statistics, Markdown tables, worker processes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sgl_rwttt.srt_ext.launch import fresh_environment, has_cuda, physical_cores

LOG_TAIL = 6000  # characters of a failed worker's log that are shown


class WorkerFailed(RuntimeError):
    """A worker process ended without a result; the message has the end of its log."""


def last_words(log: str) -> str:
    """What a failed worker's log says in one line: the last that names an error, or the last."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    named = [line for line in lines if "Refused" in line or "Error:" in line]
    return (named or lines)[-1]


@dataclass(frozen=True)
class Spread:
    """Median of repeated measurements with the smallest and the largest; all in one unit."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError (statistics.StatisticsError) for no values."""
        return cls(statistics.median(values), min(values), max(values))

    def over(self, other: Spread) -> Spread:
        """The ratio of the medians; its range is the widest that the two ranges allow."""
        return Spread(self.median / other.median, self.low / other.high, self.high / other.low)

    def text(self, form: str = ".1f", unit: str = "") -> str:
        """`median unit (low..high)`."""
        return f"{self.median:{form}}{unit} ({self.low:{form}}..{self.high:{form}})"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; raises ValueError for a row of another length."""
    cells = [list(header), *(list(row) for row in rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(3, *(len(cell) for cell in column)) for column in columns]

    def line(row: Sequence[str]) -> str:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        return f"| {' | '.join(padded)} |"

    rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    return "\n".join([line(cells[0]), rule, *(line(row) for row in cells[1:])])


def machine(threads: int) -> dict[str, Any]:
    """CPU, cores, threads used, load before the run, versions; imports torch only for a GPU's name.

    A load average well above zero means that something else was running, and so does a wide range
    in the tables.
    """
    facts: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": physical_cores(),
        "threads": threads,
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "sglang": package_version("sglang"),
    }
    if has_cuda():
        import torch

        facts["gpu"] = torch.cuda.get_device_name(0)
    return facts


def machine_line(facts: dict[str, Any]) -> str:
    """`machine` as one line of text."""
    device = f", {facts['gpu']}" if "gpu" in facts else ""
    return (
        f"{facts['cpu']}, {facts['cores']} cores, threads {facts['threads']}{device}; "
        f"python {facts['python']}, torch {facts['torch']}, sglang {facts['sglang']}; "
        f"load average before the run {facts['load']}"
    )


def cpu_model() -> str:
    """The CPU's name as the kernel reports it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def package_version(name: str) -> str:
    """Version of an installed distribution, or `not installed`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def command_line(script: str, arguments: Sequence[str], threads: int) -> str:
    """The command that repeats this run from the repository's root."""
    return f"OMP_NUM_THREADS={threads} python " + shlex.join(
        [f"benchmarks/{Path(script).name}", *arguments]
    )


def write_json(path: Path | None, report: dict[str, Any]) -> None:
    """Write the raw measurements of a run, when a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """Add --threads (default: OMP_NUM_THREADS, else the cores) and --out."""
    threads = int(os.environ.get("OMP_NUM_THREADS") or physical_cores())
    parser.add_argument("--threads", type=int, default=threads, help=f"default here: {threads}")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all measurements")


def new_parser(text: str | None) -> argparse.ArgumentParser:
    """A parser with a script's docstring as its help: the first paragraph, the rest at the end."""
    first, _, rest = (text or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=first, epilog=rest, formatter_class=form)


def add_sizes(
    parser: argparse.ArgumentParser,
    texts: Mapping[str, str],
    full: Mapping[str, Any],
    quick: Mapping[str, Any],
    nargs: str | None = None,
) -> None:
    """Add a flag of whole numbers for each size; `parse_sizes` fills in those not given."""
    for name, text in texts.items():
        shown = f"{text} (default {full[name]}, with --quick {quick[name]})"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, nargs=nargs, help=shown)


def parse_sizes(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str],
    full: Mapping[str, Any],
    quick: Mapping[str, Any],
) -> argparse.Namespace:
    """Parse with `add_run_flags` and --quick; options not given are `full`, or `quick` with it."""
    add_run_flags(parser)
    parser.add_argument("--quick", action="store_true", help="toy size; the numbers mean nothing")
    options = parser.parse_args(arguments)
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def run(
    arguments: Sequence[str] | None,
    parse: Callable[[Sequence[str]], argparse.Namespace],
    measure: Callable[[argparse.Namespace, Sequence[str]], dict[str, Any]],
    render: Callable[[dict[str, Any]], str],
) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if ``--out`` asks for it; the report."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given)
    report = measure(options, given)
    print(render(report))
    write_json(options.out, report)
    return report


def run_worker(
    script: Path,
    job: dict[str, Any],
    env: dict[str, str],
    timeout_s: float,
    *,
    python: str = sys.executable,
    live: bool = False,
) -> dict[str, Any]:
    """Run `python script JOB.json RESULT.json` in a process group of its own; return the result.

    The group is killed afterwards, whatever happened, so that no engine process survives to take
    part in the next measurement. `live` lets the worker's stderr through instead of keeping it for
    the message. Raises WorkerFailed when there is no result.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asked, answered, log = folder / "job.json", folder / "result.json", folder / "log"
        asked.write_text(json.dumps(job), encoding="utf-8")
        with log.open("w") as out:
            process = subprocess.Popen(
                [python, str(script), str(asked), str(answered)],
                stdout=out,
                stderr=None if live else subprocess.STDOUT,
                env={**fresh_environment(), **env},
                start_new_session=True,
            )
            try:
                process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not answered.is_file():
            tail = log.read_text(errors="replace")[-LOG_TAIL:]
            raise WorkerFailed(f"{script.name} gave no result (exit {process.returncode}):\n{tail}")
        result: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
        return result
