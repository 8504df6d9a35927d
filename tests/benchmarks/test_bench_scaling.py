"""The scaling benchmark finds the frontier and says what is not feasible; no engine is started."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.scripts import load, table_rows


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    return load("bench_scaling")


def point(streams: int, room: int, prompt: int = 8) -> dict[str, Any]:
    """A point of a server that runs `room` streams at once and makes the others wait."""
    run = {
        "timing": {"decode_tokens": 10 * streams, "decode_seconds": 2.0, "prefill": 1.0},
        "at_once": min(streams, room),
        "retracted": 0,
        "peak_mib": 100.0,
    }
    return {"streams": streams, "prompt": prompt, "runs": [run], "fits": streams <= room}


def refused(streams: int) -> dict[str, Any]:
    return {"streams": streams, "prompt": 8, "runs": [], "fits": False, "refused": "StateCapacity"}


@pytest.mark.parametrize("room", range(8, 16))
def test_frontier_is_found(room: int) -> None:
    """Guards: a frontier that is a guess, or one stream off."""
    worker = load("scaling_worker")
    fits, probes = worker.frontier(lambda n: point(n, room), 8, point(16, room))
    assert fits == room
    tried = {p["streams"] for p in probes} | {8, 16}
    assert {room, room + 1} <= tried and len(probes) <= 2


def test_frontier_when_the_hint_misleads() -> None:
    """Guards: a search that never ends where fewer streams fit than ran at once, or none."""
    worker = load("scaling_worker")
    retracts = {**point(16, 16), "fits": False}  # all ran at once, then some were retracted
    fits, probes = worker.frontier(lambda n: point(n, 9), 8, retracts)
    assert (fits, len(probes)) == (9, 3)
    assert worker.frontier(refused, 0, refused(1)) == (0, [])
    assert worker.frontier(refused, 0, refused(4))[0] == 0


def made_up_report() -> dict[str, Any]:
    waiting = point(4, 2, 16)
    waiting["runs"][0]["retracted"] = 1
    columns = [
        {"prompt": 8, "points": [point(n, 9) for n in (1, 2, 4)], "probes": [], "fits": 4},
        {
            "prompt": 16,
            "points": [point(1, 2, 16), point(2, 2, 16), waiting],
            "probes": [point(3, 2, 16)],
            "fits": 2,
        },
        {"prompt": 24, "points": [refused(1)], "probes": [], "fits": 0},
    ]
    served = {"ranks": 1, "load": 2, "runs": point(2, 2)["runs"]}
    two = {"ranks": 2, "load": 2, "runs": point(3, 3)["runs"]}
    return {
        "machine": load("common").machine(1),
        "command": "none",
        "streams": [1, 2, 4],
        "prompts": [8, 16, 24, 60],
        "decode": 8,
        "dtype": "float32",
        "repeats": 1,
        "attention_backend": "rwttt_cpu",
        "memory_mb": 3,
        "context": 64,
        "columns": columns,
        "pools": {"base_bytes": 2**20},
        "dp": {
            "threads": 1,
            "prompt": 8,
            "rows": [served, two, {"ranks": 4, "refused": "RefusedFlag: --dp-size"}],
        },
    }


def test_tables_of_a_made_up_report(scaling: ModuleType, tmp_path: Path) -> None:
    """Guards: a rate of streams that did not run together, a point left out without a word."""
    report = made_up_report()
    rows = table_rows(scaling.render(report))
    points = {(row[0], row[1]): row[2:] for row in rows if len(row) == 9}
    assert len(points) == 4 * 3
    assert points["8", "4"] == ["20.0", "4.00", "4", "0", "1.00", "100", "feasible"]
    assert points["16", "4"][:4] == ["-", "-", "2", "1"]
    assert points["16", "4"][-1] == "infeasible: streams wait, streams are retracted"
    assert points["24", "1"][-1] == "infeasible: refused with StateCapacity"
    assert points["24", "2"][-1] == "not run: fewer streams are infeasible already"
    assert points["60", "1"][-1] == "infeasible: the model's context is 64 tokens"
    assert [row for row in rows if len(row) == 4] == [
        ["8", "4 or more", "not tried", "3"],
        ["16", "2", "infeasible: streams wait", "3"],
        ["24", "0", "infeasible: refused with StateCapacity", "3"],
    ]
    assert [row for row in rows if len(row) == 6] == [
        ["1", "2", "10.0", "1.00", "1.00", "served"],
        ["2", "4", "15.0", "1.50", "0.75", "served"],
        ["4", "-", "-", "-", "-", "refused: RefusedFlag: --dp-size"],
    ]
    drawn = scaling.plot(report, tmp_path)
    assert [path.name for path in drawn] == ["scaling-rates.png", "scaling-memory.png"]


def test_a_refused_launch_is_a_row(scaling: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a benchmark that ends where a data-parallel size is not supported."""

    def run_worker(script: Path, job: dict[str, Any], *_: Any) -> dict[str, Any]:
        if job["options"].get("dp_size"):
            raise scaling.WorkerFailed("Traceback\n  x\nRefusedFlag: --dp-size=2: no\nbye\n")
        runs = [{"trace": run["trace"], "sessions": run["sessions"]} for run in job["runs"]]
        return {"runs": runs}

    monkeypatch.setattr(scaling, "run_worker", run_worker)
    options = scaling.parse(["--quick", "--streams", "8", "4", "--dp", "1", "2", "--threads", "2"])
    options.attention_backend = "rwttt_cpu"
    model = Path(load("bench_serving").__file__).parents[1] / "tests/data/golden/llama_embed_proj"
    found = scaling.data_parallel(options, model, [[1] * 16] * 8, 16)
    assert found["threads"] == 1
    *served, last = found["rows"]
    assert [row["load"] for row in served] == [1, 4]
    assert all(run["sessions"] for row in served for run in row["runs"])
    assert last == {"ranks": 2, "refused": "RefusedFlag: --dp-size=2: no"}


def test_a_column_ends_where_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a refusal that ends the run, another failure taken for one, points beyond the end."""
    worker = load("scaling_worker")
    job = worker.ScalingJob({}, [[n] * 9 for n in range(8)], [1, 2, 4, 8], [5, 9], 3, 2)
    bench = worker.ScalingBench.__new__(worker.ScalingBench)
    bench.asked = job
    played: list[Any] = []

    def measure_run(run: Any) -> dict[str, Any]:
        played.append(run)
        count, length = len(run.prompts), len(run.prompts[0])
        if length == 9:
            raise RuntimeError("StateCapacity: 9 pages" if count > 1 else "no engine")
        return {**point(count, 3)["runs"][0], "outputs": []}

    monkeypatch.setattr(bench, "measure_run", measure_run)
    column = bench.column(5)
    assert [(p["streams"], p["fits"]) for p in column["points"]] == [
        (1, True),
        (2, True),
        (4, False),
    ]
    assert [p["streams"] for p in column["probes"]] == [3] and column["fits"] == 3
    assert [len(p["runs"]) for p in column["points"]] == [2, 2, 2]
    assert {len(ids) for run in played for ids in run.prompts} == {5}
    assert "StateCapacity" in bench.point(2, 9)["refused"]
    with pytest.raises(RuntimeError, match="no engine"):
        bench.point(1, 9)
