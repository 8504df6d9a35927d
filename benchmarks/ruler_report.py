"""The report of bench_ruler.py: scores, paired differences, tables, a plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from common import machine_line, markdown_table
from plots import new_figure, save


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error, in percent."""

    mean: float
    error: float

    @classmethod
    def of(cls, scores: Sequence[float]) -> Estimate:
        """Of scores between 0 and 1 (or their differences); ValueError for fewer than two."""
        if len(scores) < 2:
            raise ValueError("a standard error needs two samples")
        error = statistics.stdev(scores) / sqrt(len(scores))
        return cls(100 * statistics.fmean(scores), 100 * error)

    @classmethod
    def mean_of(cls, parts: Sequence[Estimate]) -> Estimate:
        """The mean of independent estimates, each with the same weight."""
        error = sqrt(sum(part.error**2 for part in parts)) / len(parts)
        return cls(statistics.fmean(part.mean for part in parts), error)

    def text(self, sign: str = "") -> str:
        """`mean +- error`; `sign` "+" writes the sign of a positive mean too."""
        return f"{self.mean:{sign}.1f} +- {self.error:.1f}"


@dataclass(frozen=True)
class Pairs:
    """The same prompts answered in two ways."""

    left: Estimate
    right: Estimate
    difference: Estimate  # right minus left, sample by sample
    other_texts: int
    n: int

    @classmethod
    def of(cls, left: Sequence[dict[str, Any]], right: Sequence[dict[str, Any]]) -> Pairs:
        """Raises ValueError when the two did not answer the same prompts in the same order."""
        prompts = [[one["prompt_hash"] for one in way] for way in (left, right)]
        if prompts[0] != prompts[1]:
            raise ValueError("the two ways did not answer the same prompts")
        scores = [[one["score"] for one in way] for way in (left, right)]
        return cls(
            Estimate.of(scores[0]),
            Estimate.of(scores[1]),
            Estimate.of([b - a for a, b in zip(*scores, strict=True)]),
            sum(a["text"] != b["text"] for a, b in zip(left, right, strict=True)),
            len(left),
        )


def pairs(run: dict[str, Any], left: str, right: str) -> Pairs:
    """Two ways of one task at one length."""
    return Pairs.of(run["ways"][left]["samples"], run["ways"][right]["samples"])


def spread(samples: Sequence[dict[str, Any]], name: str) -> str:
    """`low..high` of a count of all samples."""
    counts = [one[name] for one in samples]
    return f"{min(counts)}..{max(counts)}"


def comparison(report: dict[str, Any], left: str, right: str) -> str:
    """One row per task and length, and the mean of the tasks of each length."""
    header = ["tokens", "task", "prompt tokens", "n", left, right, "difference"]
    header += ["other texts", f"WRITEs {left}", f"WRITEs {right}"]
    rows = []
    for length in dict.fromkeys(run["length"] for run in report["runs"]):
        runs = [run for run in report["runs"] if run["length"] == length]
        found = [pairs(run, left, right) for run in runs]
        for run, pair in zip(runs, found, strict=True):
            prompts = spread(run["ways"][left]["samples"], "prompt_tokens")
            rows.append(row(length, run["task"], prompts, [pair], writes([run], left, right)))
        if len(runs) > 1:
            rows.append(row(length, "mean", "", found, writes(runs, left, right)))
    return markdown_table(header, rows)


def row(
    length: int, name: str, prompts: str, found: Sequence[Pairs], written: list[str]
) -> list[str]:
    """The cells of one comparison, or of the mean of several."""
    cells = [Estimate.mean_of([getattr(p, side) for p in found]) for side in ("left", "right")]
    difference = Estimate.mean_of([pair.difference for pair in found])
    return [
        str(length),
        name,
        prompts,
        str(sum(pair.n for pair in found)),
        *(cell.text() for cell in cells),
        difference.text("+"),
        str(sum(pair.other_texts for pair in found)),
        *written,
    ]


def writes(runs: Sequence[dict[str, Any]], *ways: str) -> list[str]:
    """Blocks that each way wrote, with the prompt tokens whose state was reused."""
    cells = []
    for way in ways:
        states = [run["ways"][way]["state"] for run in runs]
        reused = sum(state["hit_tokens"] for state in states)
        written = f"{sum(state['commits'] for state in states):,}"
        cells.append(f"{written} ({reused:,} tokens reused)" if reused else written)
    return cells


def missing(report: dict[str, Any]) -> str:
    """The tasks whose files were not there."""
    if not report["missing"]:
        return ""
    lines = [f"- {name}: {', '.join(files)}" for name, files in report["missing"].items()]
    return "Not run, for want of these files in `--ruler-data`:\n\n" + "\n".join(lines)


def render(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    quick = "Toy size: the numbers mean nothing." if report["quick"] else ""
    chunk = report["info"]["chunk"]
    about = (
        f"{report['model']}, context {report['context']}, lm_eval {report['harness']}; "
        f"n = {report['samples']} prompts per task, batch: {report['concurrency']} at a time. "
        "Scores and differences in percent, +- standard error (of the paired differences). "
        f"A WRITE is one block of {chunk} tokens. Every prompt arrived with all its tokens, and "
        "the WRITEs are those that the tokens account for."
    )
    if report["kept"]:
        about += (
            f" {report['kept']} of {len(report['runs'])} tasks are of earlier, interrupted runs."
        )
    tables = [comparison(report, "serial", "batch")]
    if all("base" in run["ways"] for run in report["runs"]):
        tables += ["Without state (base):", comparison(report, "batch", "base")]
    head = f"{machine_line(report['machine'])}\n\n`{report['command']}`"
    parts = [head, quick, about, *tables, missing(report)]
    return "\n\n".join(part for part in parts if part)


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """One PNG per length: scores of both ways by task, with standard errors."""
    drawn = []
    for length in dict.fromkeys(run["length"] for run in report["runs"]):
        runs = [run for run in report["runs"] if run["length"] == length]
        figure = new_figure(f"RULER at {length} tokens, {report['model']}", 1.5 * len(runs) + 2)
        axes = figure.subplots()
        for place, (way, side) in enumerate((("serial", "left"), ("batch", "right"))):
            found = [getattr(pairs(run, "serial", "batch"), side) for run in runs]
            at = [index + 0.4 * place - 0.2 for index in range(len(runs))]
            errors = [one.error for one in found]
            axes.bar(at, [one.mean for one in found], 0.4, yerr=errors, capsize=3, label=way)
        axes.set_xticks(range(len(runs)), [run["task"] for run in runs])
        axes.set_ylabel("score, percent")
        axes.set_ylim(0, 100)
        axes.legend()
        drawn.append(save(figure, folder / f"ruler-{length}.png"))
    return drawn
