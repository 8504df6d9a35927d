"""The headline ratios are those of the reports that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import load, table_rows

RATES = {"serial": 10, "full": 80, "replicas": 20, "bursty": 76, "all-update": 60, "stock": 160}


def table_report() -> dict[str, Any]:
    rows = {
        name: [{"timing": {"decode_tokens": 2 * rate, "decode_seconds": 2.0}}]
        for name, rate in RATES.items()
    }
    return {"command": "the command of the table", "rows": rows}


def overhead_report() -> dict[str, Any]:
    rounds = [
        {"ours": {"decode": 1.0}, "eager": {"decode": 2.0}, "stock": {"decode": stock}}
        for stock in (0.8, 1.0)
    ]
    return {"command": "the command of the overhead", "rounds": rounds}


def test_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a ratio upside down, an aim that is met whatever comes out, a row that was not
    measured, minutes spent on what is there already."""
    headline = load("bench_headline")
    for name, report in (("table", table_report()), ("overhead", overhead_report())):
        (tmp_path / f"bench_{name}.json").write_text(json.dumps(report))
        monkeypatch.setattr(getattr(headline, f"bench_{name}"), "measure", None)
    given = ["--from", str(tmp_path), "--threads", "1"]
    text = headline.render(headline.measure(headline.parse(given), given))
    assert "- `the command of the table`\n- `the command of the overhead`" in text
    step = "time of a decode step with one stream, more than"
    assert table_rows(text) == [
        ["full over serial", "8.00", ">= 9.31", "no"],
        ["full over serial replicas", "4.00", ">= 3.44", "yes"],
        ["full over stock without TTT", "0.50", ">= 0.95", "no"],
        ["bursty-update over uniform", "0.95", ">= 0.95", "yes"],
        ["all-update over uniform", "0.75", ">= 0.95", "no"],
        [f"{step} the eager loop's", "-50.0% +- 0.0%", "<= 1.4%", "yes"],
        [f"{step} stock's", "+12.5% +- 12.5%", "<= 1.4%", "no"],
    ]


@pytest.mark.parametrize("quick", [True, False])
def test_what_is_not_there_is_measured(
    quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: flags that the benchmarks do not take, a full run where minutes were promised."""
    headline = load("bench_headline")
    asked = []

    def measured(options: Any, arguments: list[str]) -> dict[str, Any]:
        asked.append(options)
        return {}

    for module in (headline.bench_table, headline.bench_overhead):
        monkeypatch.setattr(module, "measure", measured)
    given = ["--from", str(tmp_path), "--threads", "2", *(["--quick"] if quick else [])]
    headline.measure(headline.parse(given), given)
    options, one = asked
    assert (options.quick, options.threads, options.repeats) == (quick, 2, 1)
    assert (one.quick, one.threads) == (quick, 2)
    wanted = {side for ratio in headline.RATIOS for side in (ratio.row, ratio.over)}
    assert set(options.only) == ({"full", "stock"} if quick else wanted)
