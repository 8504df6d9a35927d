"""The kernels' benchmark and the GPU scripts run; their numbers are not judged here."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.scripts import load, table_rows

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ["gpu_kernels", "gpu_decode"]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own that sees no GPU."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, f"benchmarks/{script}.py", *arguments]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=250)


def test_bench_kernels_at_toy_size() -> None:
    """Guards: a benchmark that no longer runs, a case without a time."""
    bench = load("bench_kernels")
    size = bench.Size(d_model=24, d_ff=40, chunk=4, pages=2, owners=4, layers=2)
    report = {name: bench.measure(size, name, 2) for name in ("float32", "bfloat16")}
    for cases in report.values():
        assert [case.owners for case in cases] == [4, 4, 1, 2, 4]
        for case in cases:
            assert all(0 < us.low <= us.median <= us.high < math.inf for us in case.us.values())
    rows = table_rows(bench.render(report))
    assert len(rows) == 10 and all(cell for row in rows for cell in row)


@pytest.mark.parametrize("script", SCRIPTS)
def test_without_a_gpu(script: str) -> None:
    """Guards: a script that measures a CPU as if it were a GPU."""
    done = run(script)
    assert done.returncode == 2 and "no CUDA device" in done.stderr and not done.stdout


@pytest.mark.slow
def test_gpu_kernels_tiny(tmp_path: Path) -> None:
    """Guards: a GPU script that has rotted since it last saw a GPU; an operation left out."""
    out = tmp_path / "kernels.json"
    done = run("gpu_kernels", "--tiny", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())["results"]
    measured = {result["name"].partition(",")[0] for result in results}
    assert measured == {
        "apply_state",
        "lora_apply",
        "tail_append",
        "boundary_update",
        "dense_update",
        "selective_commit",
        "checkpoint_write",
        "checkpoint_read",
    }
    assert all(result["error"] <= result["tolerance"] < 0.01 for result in results)
    assert len(table_rows(done.stdout)) == len(results) == 22


@pytest.mark.slow
def test_gpu_decode_tiny(tmp_path: Path) -> None:
    """Guards: the same for decoding; a trace or a way that is not run."""
    out = tmp_path / "decode.json"
    done = run("gpu_decode", "--tiny", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    rates = json.loads(out.read_text())["rates"]
    assert [(rate["trace"], rate["way"]) for rate in rates] == [
        (trace, way)
        for trace in ("uniform", "bursty", "all-update")
        for way in ("serial", "private", "chain")
    ]
    assert all(0 < rate["tokens_per_s"] < math.inf for rate in rates)
    assert len(table_rows(done.stdout)) == 9
