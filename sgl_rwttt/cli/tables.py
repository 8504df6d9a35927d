"""Text tables, and numbers that people read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns: numbers to the right, text to the left."""
    cells = [list(head), *([_cell(each) for each in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    right = [bool(rows) and isinstance(rows[0][i], int | float) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        parts = [
            text.rjust(width) if is_right else text.ljust(width)
            for text, width, is_right in zip(row, widths, right, strict=True)
        ]
        return "  ".join(parts).rstrip()

    return "\n".join(line(row) for row in cells)


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def size(count: int) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
