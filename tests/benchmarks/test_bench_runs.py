"""The benchmarks run and count right; their numbers are not judged here."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.scripts import load, table_rows
from tests.golden import FOLDER as GOLDEN


@pytest.fixture(scope="module")
def control() -> ModuleType:
    return load("bench_control")


@pytest.fixture(scope="module")
def serving() -> ModuleType:
    return load("bench_serving")


@pytest.fixture(scope="module")
def worker() -> ModuleType:
    return load("engine_worker")


def test_control_at_toy_size(control: ModuleType) -> None:
    """Guards: a benchmark that no longer runs, a row without a cost, bytes that do not add up."""
    size = control.Size(d_model=16, d_ff=24, layers=2, chunk=4, tokens=16)
    report = control.measure(size, repeats=3)
    names = [cost.name for cost in report.costs]
    assert names == [
        "commit",
        "rollback from 16 to 8 tokens",
        "fork, open tail of 2 rows",
        "fork, empty tail",
    ]
    for cost in (*report.costs, *report.apart, report.copy):
        assert 0 < cost.us.low <= cost.us.median <= cost.us.high < math.inf
        assert math.isfinite(report.copy.us.median / cost.us.median)
    assert [cost.copied for cost in report.costs] == [0, 0, 2 * 2 * (24 + 16) * 4, 0]
    assert report.copy.copied == 2 * 16 * 24 * 4
    page = 2 * 4 * (24 + 16) * 4
    branch, *added = report.memory.items()
    assert branch == (
        "branch after 16 written tokens (pages 1, bases 1)",
        2 * 16 * 24 * 4 + page,
    )
    assert [held for _, held in added] == [0, page, page]

    rows = table_rows(control.render([report, report]))
    assert len(rows) == 2 * (5 + 2 + 5)
    assert all(cell for row in rows for cell in row)


def test_report_files_and_failures(control: ModuleType, tmp_path: Path) -> None:
    """Guards: a ragged table, a failed engine reported as anything but its log."""
    common = load("common")
    with pytest.raises(ValueError):
        common.markdown_table(["a", "b"], [["1"]])
    ratio = common.Spread.of([2.0, 3.0, 4.0]).over(common.Spread.of([1.0, 2.0, 1.5]))
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.0, 4.0)
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no such model')")
    with pytest.raises(common.WorkerFailed, match="no such model"):
        common.run_worker(script, {}, {}, timeout_s=60.0)
    line = common.machine_line(common.machine(threads=1))
    assert "threads 1" in line and "torch" in line


def stream(worker: ModuleType, *arrivals: tuple[float, int]) -> Any:
    return worker.Stream(list(arrivals), [], None)


def test_decode_window(worker: ModuleType) -> None:
    """Guards: prefill time, first tokens or an early stream's tokens in the decode rate."""
    early = stream(worker, (1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4))
    late = stream(worker, (2.5, 1), (3.0, 2), (4.0, 4), (5.0, 5))
    assert worker.decode_window([early]) == worker.Window(3, 3.0)
    assert worker.decode_window([early, late]) == worker.Window(2 + 4, 2.5)
    with pytest.raises(ValueError, match="every stream"):
        worker.decode_window([early, stream(worker, (6.0, 1))])


def test_prompts_share_no_prefix(serving: ModuleType, tmp_path: Path) -> None:
    """Guards: streams that are served from each other's prefix, so that less is measured."""
    model = GOLDEN / "llama_embed_proj"
    prompts = serving.make_prompts(model, streams=8, length=40)
    assert {len(ids) for ids in prompts} == {40}
    assert len({ids[0] for ids in prompts}) == 8
    assert prompts == serving.make_prompts(model, streams=8, length=40)
    with pytest.raises(ValueError, match="different first tokens"):
        serving.make_prompts(model, streams=500, length=40)


def test_base_checkpoint_has_no_state(serving: ModuleType, tmp_path: Path) -> None:
    """Guards: the stock engine of the comparison serving a TTT checkpoint."""
    base = serving.base_checkpoint(GOLDEN / "llama_embed_proj", tmp_path)
    config = serving.local_config(base)
    assert config["model_type"] == "llama"
    assert not [key for key in config if key.startswith("ttt_")]
    assert (base / "model.safetensors").is_file()


def test_another_rule(serving: ModuleType, tmp_path: Path) -> None:
    """Guards: LoRA deltas measured on a checkpoint with a rule of its own, or stock given one."""
    options = serving.parse(["--quick", "--rule", "lora_delta", "--attention-backend", "x"])
    ours = serving.job_for(options, tmp_path, "float32", False, [[1]])
    stock = serving.job_for(options, tmp_path, "float32", True, [[1]])
    assert ours.state == {"ttt_memory_mb": 64, "ttt_backend": "lora_delta"}
    assert stock.state == {}


def test_a_model_that_stock_cannot_serve(
    serving: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: TTT-Linear compared with an engine that does not start, or a table that breaks."""
    jobs: list[dict[str, Any]] = []

    def worked(script: Path, job: dict[str, Any], env: Any, timeout: float) -> dict[str, Any]:
        jobs.append(job)
        run = {"tokens": 10, "prefill_seconds": 1.0, "outputs": [[1]], "state": {"writes": 2}}
        rates = {"serial": 5.0, "batch": 2.0}
        return {"runs": [{**run, "mode": m, "seconds": s} for m, s in rates.items()], "info": {}}

    monkeypatch.setattr(serving, "run_worker", worked)
    given = ["--quick", "--model", str(GOLDEN / "ttt_linear_full")]
    report = serving.measure(serving.parse(given), given)
    assert [job["ttt"] for job in jobs] == [True]
    rates, prefill, *_ = table_rows(serving.render(report))
    assert rates[1:] == ["2.0 (2.0..2.0)", "5.0 (5.0..5.0)", "-", "2.50 (2.50..2.50)", "-"]
    assert prefill[-1] == "-"


@pytest.mark.engine
def test_serving_at_toy_size(serving: ModuleType) -> None:
    """Guards: a window of other tokens, an engine that is not the one named, lost writes."""
    given = ["--quick", "--decode", "10", "--model", str(GOLDEN / "llama_embed_proj")]
    report = serving.measure(serving.parse([*given, "--threads", "1"]), given)
    (result,) = report["results"]
    runs = [*result["ours"]["runs"], *result["stock"]["runs"]]
    assert [run["mode"] for run in runs] == ["serial", "batch", "batch"]
    assert [run["tokens"] for run in runs] == [2 * 9] * 3
    assert serving.equal_outputs(result) == 2
    assert all(math.isfinite(spread.median) for spread in serving.summary(result).values())
    for run in result["ours"]["runs"]:  # 2 streams of 16 + 9 consumed tokens, chunks of 8
        steps = run["state"]
        assert (steps["owner_steps"], steps["writes"], steps["decode_writes"]) == (20, 6, 2)
        assert steps["failed_writes"] == steps["drops"] == 0
    assert result["stock"]["info"] == result["stock"]["runs"][0]["state"] == {}
    rows = table_rows(serving.render(report))
    assert [row[0] for row in rows] == ["float32"] * 4
