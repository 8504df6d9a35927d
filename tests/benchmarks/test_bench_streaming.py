"""The streaming benchmark divides the stream the right way; its numbers are not judged here."""

from __future__ import annotations

import pytest

from tests.benchmarks.scripts import load, table_rows


def test_windows_and_report() -> None:
    """Guards: time per token over the wrong count, a window that hides a slow end."""
    bench = load("bench_streaming")
    points = [(2.0 + 0.064 * i, 1 + 64 * i, (100 + i) << 20) for i in range(9)]
    points += [(points[-1][0] + 0.128 * i, points[-1][1] + 64 * i, 108 << 20) for i in range(1, 9)]
    found = bench.windows(points, 2)
    assert [(w["first"], w["last"]) for w in found] == [(1, 513), (513, 1025)]
    assert [round(w["ms"], 6) for w in found] == [1.0, 2.0]
    assert [w["mb"] for w in found] == [108, 108]
    with pytest.raises(ValueError, match="too few"):
        bench.windows(points[:3], 2)
    report = {
        "machine": bench.machine(1),
        "command": "x",
        "read": 1000,
        "read_seconds": 2.0,
        "windows": found,
        "store": {"evictions": 7},
        "bytes": {"page": 5, "version": 6},
    }
    rows = table_rows(bench.render(report))
    assert rows == [["1001 to 1513", "1.00", "108"], ["1513 to 2025", "2.00", "108"]]
