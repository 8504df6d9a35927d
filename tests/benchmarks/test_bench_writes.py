"""The benchmark of WRITEs finds the step with the WRITE; nothing judges a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.scripts import load, table_rows


class Clock:
    """Time as a fake server lets it pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Server:
    """Takes 1 s per decode step, and 10 s per owner more where a chunk of 16 is complete."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def info(self) -> dict[str, Any]:
        return {"chunk": 16, "vocab_size": 100}

    def generate_siblings(self, payload: dict[str, Any]) -> Iterator[dict[str, Any]]:
        prompts, sampling = payload["input_ids"], payload["sampling_params"]
        assert len({ids[0] for ids in prompts}) == len(prompts)
        for count in range(1, sampling[0]["max_new_tokens"] + 1):
            consumed = len(prompts[0]) + count - 1
            self.clock.now += 1 + (10 * len(prompts) if consumed % 16 == 0 else 0)
            for index in range(len(prompts)):
                yield {"index": index, "meta_info": {"completion_tokens": count}}


def test_the_step_with_the_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the step before or after the boundary taken for it, a group counted twice."""
    worker, clock = load("writes_worker"), Clock()
    monkeypatch.setattr(worker, "time", clock)
    found = worker.writes(Server(clock), [1, 4], 2)
    assert found["1"] == [{"write": 11.0, "plain": 1.0}] * 2
    assert found["4"] == [{"write": 41.0, "plain": 1.0}] * 2


def test_reports(tmp_path: Path) -> None:
    """Guards: the cost of a group for that of an owner; a difference that is not one; no plot."""
    writes, facts = load("bench_writes"), load("common").machine(1)
    pools = {"chunk": 32, "page_bytes": 2048, "base_bytes": 0, "fold_pages": 0}
    result = {"groups": {"4": [{"write": 0.041, "plain": 0.001}]}, "pools": pools}
    report: dict[str, Any] = {
        "machine": facts,
        "command": "none",
        "size": {"repeats": 1},
        "results": {"in_place": result},
    }
    row, memory = table_rows(writes.render(report))
    assert row == ["in_place", "32", "4", "1.0 (1.0..1.0)", "10.0 (10.0..10.0)"]
    assert memory == ["in_place", "32", "2.0", "0.0", "never"]
    (drawn,) = writes.plot(report, tmp_path)
    assert drawn.name == "writes-group.png" and drawn.stat().st_size > 1000

    adapters = load("check_adapters")
    sides = {
        "ours": {"before": 2.5, "after": 2.25, "updates": 2},
        "peft": {"fresh": 3.0, "before": 2.5, "after": 2.5},
    }
    report = {**report, "size": {"steps": 1}, "results": {"code": sides}}
    assert adapters.differences(report) == {"code": (0.0, 0.25)}
    (row,) = table_rows(adapters.render(report))
    assert row[4:] == ["0.0e+00", "2.5e-01", "2"]
