"""Plots of reports, and what they share: `plots.py SCRIPT REPORT.json FOLDER`.

Calls `plot(report, folder)` of `SCRIPT.py`, where it has one, and prints the names of the files
that it drew. Without matplotlib nothing is drawn, and stderr says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Spread

INCHES = 4.0  # height of a figure
DPI = 120


def new_figure(title: str, width: float = 6.0) -> Any:
    """An empty figure with a title; `width` in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, INCHES), layout="constrained")
    figure.suptitle(title)
    return figure


def line(
    axes: Any, xs: Sequence[float], spreads: Sequence[Spread], label: str | None = None
) -> None:
    """Medians with their ranges as bars."""
    below = [spread.median - spread.low for spread in spreads]
    above = [spread.high - spread.median for spread in spreads]
    medians = [spread.median for spread in spreads]
    axes.errorbar(xs, medians, [below, above], marker="o", capsize=3, label=label)


def save(figure: Any, path: Path) -> Path:
    """Write a figure as PNG; its path."""
    figure.savefig(path, dpi=DPI)
    return path


def main(arguments: Sequence[str]) -> int:
    """Draw what one report has to show; 2 for wrong usage."""
    if len(arguments) != 3:
        print("usage: plots.py SCRIPT REPORT.json FOLDER", file=sys.stderr)
        return 2
    script, report, folder = arguments
    plot = getattr(importlib.import_module(script), "plot", None)
    if plot is None:
        return 0
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is not installed", file=sys.stderr)
        return 0
    for path in plot(json.loads(Path(report).read_text(encoding="utf-8")), Path(folder)):
        print(Path(path).name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
