"""The serving table counts and divides right, and its eager peer computes what was published."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.scripts import BENCHMARKS, load, table_rows
from tests.golden import golden_case


@pytest.fixture(scope="module")
def eager() -> ModuleType:
    return load("eager_worker")


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return load("bench_table")


def test_eager_peer_is_the_published_rule(eager: ModuleType) -> None:
    """Guards: a peer that is quick because it does not learn, or learns something else."""
    case = golden_case("llama_embed_proj")
    count = len(case.generated_ids)
    loop = eager.EagerLoop(case.path, "float32")
    job = eager.EagerJob(str(case.path), "float32", [case.prompt_ids] * 2, [count + 1, 9], 1)
    run = eager.measure(loop, job)
    assert run["outputs"][0][:count] == case.generated_ids
    assert run["outputs"][1] == run["outputs"][0][:9]  # a stream starts without the last one's
    chunk, prompt = case.config["ttt_chunk"], len(case.prompt_ids)
    written = [(prompt + decoded) // chunk - prompt // chunk for decoded in (count, 8)]
    assert run["state"]["decode_writes"] == sum(written)
    assert run["planner"]["rows"] == run["timing"]["decode_tokens"] == count + 8

    loop.stream(case.prompt_ids, count + 1)
    for layer, expected in case.final_fast_weight.items():
        moved = (expected - case.initial_weight[layer]).abs().max()
        assert (loop.fast[layer].weight - expected).abs().max() < 1e-3 * moved


def made_up_run(rate: float, outputs: list[list[int]], mib: float = 100.0) -> dict[str, Any]:
    """A run in which `rate` tokens per second were decoded for two seconds."""
    return {
        "timing": {"decode_tokens": 2 * rate, "decode_seconds": 2.0, "prefill": 1.0},
        "outputs": outputs,
        "peak_mib": mib,
        "state": {"decode_writes": 3},
        "planner": {"rows": 10},
    }


def made_up_report() -> dict[str, Any]:
    same = [[1, 2], [3, 4], [5, 6], [7, 8]]
    stock = [{**made_up_run(50.0, same), "state": {}}]
    del stock[0]["planner"]
    return {
        "machine": load("common").machine(1),
        "command": "none",
        "size": {"streams": 4, "prompt": 8, "decode": 2, "chunk": 8},
        "dtype": "float32",
        "repeats": 2,
        "attention_backend": "rwttt_cpu",
        "stock_overlap": "off",
        "replicas": {"matched": 2, "used": 2},
        "failed": {"bursty": "RuntimeError: no port"},
        "rows": {
            "serial": [made_up_run(5.0, same[:2], 60.0), made_up_run(15.0, same[:2], 50.0)],
            "full": [made_up_run(40.0, same, 110.0)] * 2,
            "replicas": [made_up_run(16.0, [[1, 2], [5, 6], [3, 4], [7, 9]], 100.0)],
            "eager": [made_up_run(8.0, [[1, 2], [3, 9]])],
            "siblings": [made_up_run(30.0, same)],
            "stock": stock,
            "stock siblings": [made_up_run(60.0, same)],
        },
    }


def test_table_of_a_made_up_report(table: ModuleType, tmp_path: Path) -> None:
    """Guards: a ratio upside down or over another row, streams that are compared with others."""
    report = made_up_report()
    text = table.render(report)
    rows = {row[0]: row[1:] for row in table_rows(text)}
    assert list(rows) == [
        *("serial TTT", "serial replicas, k = 2", "eager loop of transformers"),
        *("full read/write", "sibling forks", "stock, no TTT", "stock, siblings"),
    ]
    assert rows["serial TTT"][:3] == ["2", "10.0 (5.0..15.0)", "1.00"]
    full = rows["full read/write"]
    assert full[2:5] == ["4.00 (2.67..8.00)", "2.50", "0.80"]
    assert full[5:] == ["10", "3", "110", "0.25"]
    assert rows["sibling forks"][4] == "0.50"
    assert rows["stock, no TTT"][5:7] == ["-", "-"]
    assert rows["serial replicas, k = 2"][8] == "0.50"  # 1 s for the 2 streams that each has
    assert "2 of them match it" in text and "bursty was not measured: RuntimeError" in text
    assert "serial 0 of 2, replicas 1 of 4, eager 1 of 2" in text
    (drawn,) = table.plot(report, tmp_path)
    assert drawn.name == "table-rates.png" and drawn.stat().st_size > 0


def test_replicas_are_as_many_as_fit_the_memory(table: ModuleType) -> None:
    """Guards: more peers than the memory holds, none at all, a share that nobody answers."""
    rows_of = load("table_rows")
    options = table.parse(["--quick", "--streams", "4"])
    size = table.Size(4, 8, 2, 8)
    for ours, alone, expected in ((110.0, 50.0, 2), (60.0, 50.0, 1), (40.0, 90.0, 1)):
        rows = {"full": [made_up_run(1.0, [], ours)], "serial": [made_up_run(1.0, [], alone)]}
        bench = table.Bench(options, Path(), Path(), size, [], rows)
        assert rows_of.replica_count(bench) == bench.matched == expected
    options.replicas = 3
    assert (rows_of.replica_count(bench), bench.matched) == (3, 1)

    trace = rows_of.TraceRun("uniform", [[i] for i in range(5)], [2] * 5, [0.0] * 5)
    shares = [rows_of.shared(trace, part, 2, 9).prompts for part in range(2)]
    assert shares == [[[0], [2], [4]], [[1], [3]]]
    slow, quick = made_up_run(5.0, [[1]], 60.0), made_up_run(7.0, [[2]], 70.0)
    slow["timing"] |= {"tokens": 4, "prefill": 3.0}
    quick["timing"] |= {"tokens": 4}
    both = rows_of.joined([slow, quick])
    assert (both["peak_mib"], both["timing"]["prefill"]) == (130.0, 3.0)
    assert both["timing"]["decode_tokens"] / both["timing"]["decode_seconds"] == 12.0
    assert both["outputs"] == [[1], [2]]


def test_wrong_usage(table: ModuleType) -> None:
    """Guards: an hour of engines for a row that cannot be made of them."""
    for given in (["--only", "replicas"], ["--decode", "1"], ["--replicas", "0"]):
        with pytest.raises(SystemExit):
            table.parse(given)
    short, full = table.parse([]), table.parse(["--budget", "full"])
    assert (short.repeats, short.serial_streams) == (1, 2)
    assert (full.repeats, full.serial_streams) == (3, None)


def test_siblings_share_all_but_their_own_tokens(table: ModuleType) -> None:
    """Guards: a fork at a place where the prompts differ already, or siblings that say the same."""
    prompts = [[n] * 16 for n in range(3)]
    bench = table.Bench(table.parse(["--quick"]), Path(), Path(), table.Size(3, 8, 2, 8), prompts)
    run = bench.siblings()
    assert [ids[: run.fork] for ids in run.prompts] == [[0] * 7] * 3
    assert len({tuple(ids[run.fork :]) for ids in run.prompts}) == 3


TOUCHING = """
import sys
sys.path.insert(0, sys.argv[1])
import footprint
footprint.reset_peaks()
before = footprint.peak_mib()
block = bytearray(64 * footprint.MIB)
block[::4096] = b"x" * len(block[::4096])
del block
print(footprint.peak_mib() - before)
"""


def test_memory_counts_what_is_touched() -> None:
    """Guards: a column of zeros, memory that is given back before it is looked at.

    In a session of its own: this one has children, and other tests run in it.
    """
    found = subprocess.run(
        [sys.executable, "-c", TOUCHING, str(BENCHMARKS)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        start_new_session=True,
    )
    assert 48 < float(found.stdout) < 96


def test_a_failed_engine_costs_its_own_rows(
    table: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: an hour of measurements lost with the last engine, a failure that is not told."""

    def work(bench: Any, job: Any, threads: int | None = None) -> list[dict[str, Any]]:
        if not job.ttt:
            raise table.WorkerFailed("gave no result:\nRuntimeError: no port\n")
        return [
            {**made_up_run(5.0, [[1]] * len(run.prompts)), "trace": run.trace} for run in job.runs
        ]

    monkeypatch.setattr(table.Bench, "work", work)
    rows = ["serial", "full", "bursty", "stock", "phase", "commit", "all-update"]
    given = ["--quick", "--only", *rows, "--model", str(golden_case("llama_embed_proj").path)]
    with pytest.raises(SystemExit) as ended:
        table.main([*given, "--threads", "1"])
    assert ended.value.code == 1
    report = table.measure(table.parse(given), given)
    assert list(report["rows"]) == ["serial", "full", "bursty", "phase", "commit", "all-update"]
    assert report["failed"] == {"stock": "RuntimeError: no port"}
