"""Markdown tables of a report as CSV files."""

from __future__ import annotations

import csv
import re
from pathlib import Path

Table = list[list[str]]  # the header first

_RULE = re.compile(r"\|(\s*:?-+:?\s*\|)+")
_BETWEEN_CELLS = re.compile(r"(?<!\\)\|")


def markdown_tables(text: str) -> list[Table]:
    """Every table of a Markdown text in order."""
    tables: list[Table] = []
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines):
        if not line.startswith("|"):
            continue
        if _RULE.fullmatch(line):
            tables.append([_cells(lines[number - 1])])
        elif tables and not (number + 1 < len(lines) and _RULE.fullmatch(lines[number + 1])):
            tables[-1].append(_cells(line))
    return tables


def _cells(line: str) -> list[str]:
    parts = _BETWEEN_CELLS.split(line)[1:-1]
    return [part.strip().replace("\\|", "|") for part in parts]


def write_tables(text: str, folder: Path, name: str) -> list[Path]:
    """Write table n of a Markdown text as `NAME-n.csv`; the files, n from 1."""
    files = []
    for number, table in enumerate(markdown_tables(text), start=1):
        file = folder / f"{name}-{number}.csv"
        with file.open("w", newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(table)
        files.append(file)
    return files
