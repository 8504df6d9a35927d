"""Running the scripts of some parts into one folder."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import sgl_rwttt
from sgl_rwttt.srt_ext.launch import fresh_environment

from .bench_parts import Part, Script
from .bench_process import run_process
from .bench_record import Done, Record
from .bench_tables import write_tables

PLOT_LIMIT_S = 300.0
LOG_LINES = 8  # of a failed script's log that are shown
OK_TEXT, FAILED_TEXT, KEPT_TEXT = "done", "FAILED", "done before"


@dataclass(frozen=True)
class Result:
    """One script of this run: part, script, outcome in words, minutes."""

    part: str
    script: str
    outcome: str
    minutes: float

    @property
    def is_good(self) -> bool:
        """Whether it has results."""
        return self.outcome in (OK_TEXT, KEPT_TEXT)


def limit_s(script: Script) -> float:
    """When a script is given up: slower machines get their time, but it ends."""
    return 3600.0 + 10 * 60 * script.minutes


class Bar:
    """Progress over the estimated minutes of all scripts, on stderr."""

    def __init__(self, minutes: float, is_shown: bool) -> None:
        self.minutes, self.before, self.now = minutes, 0.0, 0.0
        self.title = ""
        self.bar = tqdm(
            total=minutes, disable=not is_shown, bar_format="{percentage:3.0f}% |{bar:24}| {desc}"
        )

    def begin(self, title: str, minutes: float) -> None:
        """The next script, with its estimate."""
        self.title, self.now = title, minutes
        tqdm.write(f"{title}, about {minutes:.2g} min", file=sys.stderr)
        self.tick(0.0)

    def tick(self, seconds: float) -> None:
        """The script has run for so long; it counts for its estimate at most."""
        passed = self.before + min(seconds / 60, self.now)
        self.bar.n = passed
        left = f"about {self.minutes - passed:.0f} min left"
        self.bar.set_description_str(f"{self.title}, {left}")

    def end(self) -> None:
        """The script is over."""
        self.tick(60 * self.now)
        self.before += self.now


def run_parts(
    parts: Sequence[Part], scripts: Path, folder: Path, record: Record, is_shown: bool
) -> list[Result]:
    """Run every script that the record does not have yet; a failed one leaves the others alone.

    Writes NAME.md, NAME.json, NAME-n.csv, NAME.log and plots into `folder`, and the record after
    every script.
    """
    jobs = [(part, script) for part in parts for script in part.scripts]
    todo = [script for _, script in jobs if not record.is_done(script.name)]
    bar = Bar(sum(script.estimate(record.quick) for script in todo), is_shown)
    results = []
    with bar.bar:
        for number, (part, script) in enumerate(jobs, start=1):
            if script in todo:
                bar.begin(
                    f"[{number}/{len(jobs)}] {part.name}: {script.name}.py",
                    script.estimate(record.quick),
                )
                record.scripts[script.name] = _run(script, scripts, folder, record, bar)
                record.write(folder)
                bar.end()
            done = record.scripts[script.name]
            if done.status == 0 and done.plots is None:
                done.plots = _plot(script.name, scripts, folder)
                record.write(folder)
            result = _result(part, script, done, is_new=script in todo)
            results.append(result)
            if not result.is_good:
                _report(result, folder / f"{script.name}.log")
    return results


def _run(script: Script, scripts: Path, folder: Path, record: Record, bar: Bar) -> Done:
    start = time.monotonic()
    name, report = script.name, folder / f"{script.name}.md"
    for old in (*folder.glob(f"{name}-*.csv"), *folder.glob(f"{name}.*")):
        old.unlink()
    command = [
        sys.executable,
        os.fspath(scripts / f"{name}.py"),
        *script.arguments(record.quick),
    ]
    outputs = (report, folder / f"{name}.log")
    env = _environment(record.threads)
    status = run_process(command, folder, env, outputs, limit_s(script), bar.tick)
    write_tables(report.read_text(encoding="utf-8", errors="replace"), folder, name)
    return Done(status, time.monotonic() - start)


def _plot(name: str, scripts: Path, folder: Path) -> list[str] | None:
    """The names of the files that the script's `plot` draws; None when it failed."""
    if not (folder / f"{name}.json").is_file():
        return []
    names = folder / f".{name}.plots"
    status = run_process(
        [sys.executable, os.fspath(scripts / "plots.py"), name, f"{name}.json", "."],
        folder,
        _environment(1),
        (names, folder / f"{name}.log"),
        PLOT_LIMIT_S,
        lambda seconds: None,
    )
    drawn = names.read_text(encoding="utf-8").split()
    names.unlink()
    return drawn if status == 0 else None


def _environment(threads: int) -> dict[str, str]:
    """For scripts in another folder, which import the package that this command is of."""
    package = os.fspath(Path(sgl_rwttt.__file__).resolve().parents[1])
    before = os.environ.get("PYTHONPATH")
    return {
        **fresh_environment(),
        "PYTHONPATH": f"{package}{os.pathsep}{before}" if before else package,
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "MPLBACKEND": "Agg",
    }


def _result(part: Part, script: Script, done: Done, is_new: bool) -> Result:
    if done.status:
        outcome = f"{FAILED_TEXT}, exit status {done.status}"
    elif done.plots is None:
        outcome = f"{FAILED_TEXT}: no plots"
    else:
        outcome = OK_TEXT if is_new else KEPT_TEXT
    return Result(part.name, script.name, outcome, round(done.seconds / 60, 1))


def _report(result: Result, log: Path) -> None:
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    text = "\n".join([f"{result.script}.py: {result.outcome}; {log}:", *(f"  {x}" for x in last)])
    tqdm.write(text, file=sys.stderr)
