"""One engine that runs traces in a process of its own: `modes_worker.py JOB.json RESULT.json`.

Started by bench_modes.py. Importing this file costs nothing heavy: SGLang's own processes import it
again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine_worker import WARMUP_TOKENS, Bench, Job, Stream
from traces import timing


@dataclass(frozen=True)
class TraceRun:
    """One trace with its token ids; plain values, it travels as JSON."""

    trace: str
    prompts: list[list[int]]
    decode: list[int]  # tokens to generate, per stream
    at: list[float]  # arrivals, in decode steps of the job's first run


@dataclass(frozen=True)
class TraceJob:
    """What one engine is asked to do."""

    model: str  # checkpoint folder
    options: dict[str, Any]  # keyword arguments of sglang.Engine
    state: dict[str, Any]  # `ttt_*` options
    runs: list[TraceRun]  # in this order in every repeat; the first without arrivals
    repeats: int

    @classmethod
    def read(cls, path: Path) -> TraceJob:
        """From JSON."""
        given = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**given, "runs": [TraceRun(**run) for run in given["runs"]]})


class TraceBench(Bench):
    """An engine that answers the streams of a trace when they arrive."""

    def __init__(self, job: TraceJob) -> None:
        super().__init__(Job(job.model, job.options, job.state, True, [], 0, 1, []))
        self.pace = 0.0  # seconds of a decode step in the job's first run

    def play(self, run: TraceRun) -> tuple[list[float], list[Stream]]:
        """Answer a trace; (time of submission of each stream, answers)."""
        submitted = [0.0] * len(run.prompts)

        async def arrive(index: int) -> Stream:
            await asyncio.sleep(run.at[index] * self.pace)
            submitted[index] = time.perf_counter()
            return await self.stream(run.prompts[index], run.decode[index])

        async def together() -> list[Stream]:
            return await asyncio.gather(*(arrive(i) for i in range(len(run.prompts))))

        return submitted, self.engine.loop.run_until_complete(together())

    def measure_run(self, run: TraceRun) -> dict[str, Any]:
        """One trace from empty caches."""
        self.flush()
        before = self.info()
        submitted, answers = self.play(run)
        after = self.info()
        timed = timing(submitted, answers)
        if not self.pace:
            self.pace = timed.decode_seconds / (max(run.decode) - 1)
        return {
            "trace": run.trace,
            "prompt_tokens": sum(map(len, run.prompts)),
            "timing": asdict(timed),
            "outputs": [answer.output for answer in answers],
            "planner": planner_work(before["planner"], after["planner"]),
            "failed_writes": after["counters"]["failed_writes"],
        }


def planner_work(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """Rounds, forward passes and held stream-rounds of one run; the longest wait of the engine."""
    counted = ("rounds", "forwards", "held")
    return {
        **{name: after[name] - before[name] for name in counted},
        "max_wait": after["max_wait"],
        "wait_budget": after["wait_budget"],
    }


def work(job: TraceJob) -> dict[str, Any]:
    """Start the engine, warm it up, run every trace `repeats` times, stop it."""
    bench = TraceBench(job)
    try:
        first = job.runs[0]
        bench.run(first.prompts, min(*first.decode, WARMUP_TOKENS))
        runs = [bench.measure_run(run) for _ in range(job.repeats) for run in job.runs]
        return {"runs": runs}
    finally:
        bench.engine.shutdown()


def main() -> None:
    """Read the job, write the result; a failure leaves no result and a traceback in the log."""
    from sgl_rwttt.srt_ext.launch import prepare_environment

    prepare_environment()
    job = TraceJob.read(Path(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(work(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
