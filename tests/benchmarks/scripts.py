"""The benchmarks' folder is no package: its files are run as scripts, and loaded here by name."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def load(name: str) -> ModuleType:
    """A module of the benchmarks' folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)


def table_rows(text: str) -> list[list[str]]:
    """The cells of every Markdown table row of a report, headers and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rules = {i for i, line in enumerate(lines) if set(line) <= set("|-")}
    kept = [line for i, line in enumerate(lines) if i not in rules and i + 1 not in rules]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]
