"""The attention benchmark runs and divides the right way round; its numbers are not judged here."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.scripts import load, table_rows


@pytest.mark.slow
def test_layers_at_toy_size() -> None:
    """Guards: a benchmark that no longer runs, backends that are not compared on one pool."""
    bench = load("bench_attention")
    given = ["--quick", "--only", "layer", "--threads", "1"]
    report = bench.measure(bench.parse(given), given)
    names = [case.name for case in report["layers"]["float32"]]
    assert names == [
        "decode 2 x 16",
        "prefill 2 x 16",
        "prefill 2 x 4 after 12",
        "decode 2 siblings x 16",
        "decode 1 x 24",
        "prefill 1 x 24",
        "prefill 1 x 6 after 18",
    ]
    rows = table_rows(bench.render(report))
    assert [row[1] for row in rows] == names


def test_a_ratio_is_the_gain() -> None:
    """Guards: a table in which slower looks faster."""
    bench = load("bench_attention")

    def run(step: float) -> list[dict[str, Any]]:
        return [{"step": step, "prefill": 2 * step, "outputs": [[1, 2], [3, 4]]}]

    ms = {name: bench.Spread.of([t]) for name, t in (("torch_native", 6.0), ("rwttt_cpu", 2.0))}
    assert bench.Case("x", ms).ratio == 3.0
    (row,) = bench.step_rows(
        "float32", {"2 x 8": {"torch_native": run(0.4), "rwttt_cpu": run(0.1)}}
    )
    assert (row[4], row[7], row[8]) == ("4.00", "4.00", "2")
