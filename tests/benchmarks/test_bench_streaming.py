"""The streaming benchmark counts the right tokens; its numbers are not judged here."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.scripts import load, table_rows


def test_costs_and_report(tmp_path: Path) -> None:
    """Guards: cached tokens counted as read, the first token's wait counted as decode, no plot."""
    bench = load("bench_streaming")
    points = [(0.0, 1024), (2.0, 1), (2.064, 65), (2.256, 129)]
    row = bench.depth_costs(2048, points)
    assert (row["read"], row["read_ms"]) == (1024, 1000 * 2.0 / 1024)
    assert round(row["generate_ms"], 6) == 2.0
    report = {
        "machine": bench.machine(1),
        "command": "x",
        "rows": [{**row, "mb": 100.4}],
        "bytes": {"page": 5000, "version": 6000},
    }
    assert table_rows(bench.render(report)) == [["2,048", "1,024", "1.95", "2.00", "100"]]
    (drawn,) = bench.plot(report, tmp_path)
    assert drawn.name == "streaming-depth.png" and drawn.stat().st_size > 1000
