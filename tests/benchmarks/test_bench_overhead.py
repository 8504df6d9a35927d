"""The overhead benchmark pairs what ran in one round; workers in turns end when they should."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.benchmarks.scripts import BENCHMARKS, load, table_rows

ECHO = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
from live_worker import serve

def start(job):
    def answer(question):
        if question["n"] == "die":
            raise SystemExit("no more")
        time.sleep(question.get("wait", 0))
        return {{"sum": job["base"] + question["n"]}}
    return answer

serve(start)
"""


@pytest.fixture(scope="module")
def overhead() -> ModuleType:
    return load("bench_overhead")


def state_of(process: int) -> str:
    """The process's state letter; T is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]


def test_workers_answer_in_turn(tmp_path: Path) -> None:
    """Guards: a worker that runs beside the one that is measured, a dead or slow one waited for."""
    live = load("live_worker")
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    with live.LiveWorker(script, {"base": 1}, {}, 60.0) as one:
        with live.LiveWorker(script, {"base": 10}, {}, 60.0) as other:
            assert [w.ask({"n": 5})["sum"] for w in (one, other, one)] == [6, 15, 6]
            with pytest.raises(live.WorkerFailed, match="no more"):
                other.ask({"n": "die"})
        assert state_of(one.process.pid) == "T"
        one.wait_s = 0.2
        with pytest.raises(live.WorkerFailed, match="no answer"):
            one.ask({"n": 1, "wait": 30})
    assert one.process.returncode is not None
    with pytest.raises(live.WorkerFailed, match="KeyError"):
        live.LiveWorker(script, {}, {}, 60.0).ask({"n": 1})


PARENT = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from live_worker import LiveWorker

worker = LiveWorker(Path(sys.argv[2]), {"base": 1}, {}, 60.0)
print(worker.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_stopped_worker_dies_with_its_parent(tmp_path: Path) -> None:
    """Guards: stopped engines that keep their memory after a benchmark was killed."""
    script = tmp_path / "echo.py"
    script.write_text(ECHO)
    command = [sys.executable, "-c", PARENT, str(BENCHMARKS), str(script)]
    worker = int(subprocess.run(command, stdout=subprocess.PIPE, check=False, timeout=60).stdout)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and runs(worker):
        time.sleep(0.05)
    assert not runs(worker)


def runs(process: int) -> bool:
    """Whether a process is there, and not only to be waited for."""
    try:
        return state_of(process) != "Z"
    except FileNotFoundError:
        return False


def made_up_report() -> dict[str, Any]:
    """The machine slows down from round to round; ours takes 2 % and 4 % more than stock."""
    rounds = []
    for number, share in enumerate((1.02, 1.04)):
        slow = 0.1 * (1 + number)

        def run(seconds: float, output: list[int]) -> dict[str, Any]:
            times = dict.fromkeys(("decode", "median_step", "prefill"), seconds)
            return {**times, "output": output}

        rounds.append(
            {
                "ours": run(slow * share, [1, 2]),
                "eager": run(2 * slow * share, [1, 2 + number]),
                "stock": run(slow, [9]),
            }
        )
    return {
        "machine": load("common").machine(1),
        "command": "none",
        "prompt": 8,
        "decode": 2,
        "dtype": "float32",
        "attention_backend": "rwttt_cpu",
        "rounds": rounds,
    }


def test_differences_are_paired(overhead: ModuleType, tmp_path: Path) -> None:
    """Guards: a drift of the machine taken for a cost, the smaller side as the base."""
    report = made_up_report()
    assert overhead.differences(report, "stock", "decode") == pytest.approx([0.02, 0.04])
    mean, error = overhead.mean_error([0.02, 0.04])
    assert (mean, error) == pytest.approx((0.03, 0.01))
    assert math.isnan(overhead.mean_error([0.02])[1])
    text = overhead.render(report)
    rows = [row for row in table_rows(text) if row[0] in ("eager", "stock") and row[1] == "prefill"]
    assert [row[2:4] for row in rows] == [
        ["-50.0% +- 0.0%", "-50.0%..-50.0%"],
        ["+3.0% +- 1.0%", "+2.0%..+4.0%"],
    ]
    assert "said the same: 1 of 2" in text
    (drawn,) = overhead.plot(report, tmp_path)
    assert drawn.name == "overhead-differences.png"


def test_a_step_is_of_decoded_tokens(overhead: ModuleType) -> None:
    """Guards: the prefill's token in the rate, a chunk of two tokens as one step."""
    worker = load("overhead_worker")
    stream = worker.Stream([(2.0, 1), (2.5, 2), (3.5, 4), (4.5, 5)], [1] * 5, None)
    found = worker.times(0.5, stream)
    assert (found["prefill"], found["decode"], found["median_step"]) == (1.5, 0.625, 0.5)
