"""One engine that runs traces in a process of its own: `modes_worker.py JOB.json RESULT.json`.

Started by bench_modes.py, bench_table.py and bench_scaling.py. Importing this file costs nothing
heavy: SGLang's own processes import it again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine_worker import WARMUP_TOKENS, Bench, Job, Stream, state_steps
from footprint import peak_mib, reset_peaks
from traces import in_turn, most_at_once, timing

WARMUP_PROMPT = 64  # tokens of each prompt of the warm-up
MEET_S = 900.0  # how long engines that are to start together wait for each other
MEET_POLL_S = 0.05
FAILED = "failed"  # a file in the folder where engines meet: one of them does not come


@dataclass(frozen=True)
class TraceRun:
    """One trace with its token ids; plain values, it travels as JSON."""

    trace: str
    prompts: list[list[int]]
    decode: list[int]  # tokens to generate, per stream
    at: list[float]  # arrivals, in decode steps of the job's first run
    in_turn: bool = False  # one stream after the other, each from empty caches
    fork: int = 0  # tokens that all prompts begin with: read once, then forked
    sessions: bool = False  # every stream in a session of its own, else outside of any


@dataclass(frozen=True)
class TraceJob:
    """What one engine is asked to do."""

    model: str  # checkpoint folder
    options: dict[str, Any]  # keyword arguments of sglang.Engine
    state: dict[str, Any]  # `ttt_*` options
    runs: list[TraceRun]  # in this order in every repeat; the first without arrivals
    repeats: int
    ttt: bool = True  # whether the engine has a state runtime that is asked for its statistics
    meet: dict[str, Any] = field(default_factory=dict)  # `folder` where `count` engines meet

    @classmethod
    def read(cls, path: Path) -> TraceJob:
        """From JSON."""
        given = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**given, "runs": [TraceRun(**run) for run in given["runs"]]})


@dataclass(frozen=True)
class Played:
    """A trace that was answered."""

    submitted: list[float]  # time in s, per stream
    answers: list[Stream]


class TraceBench(Bench):
    """An engine that answers the streams of a trace when they arrive."""

    def __init__(self, job: TraceJob) -> None:
        super().__init__(Job(job.model, job.options, job.state, job.ttt, [], 0, 1, []))
        self.pace = 0.0  # seconds of a decode step in the job's first run

    def play(self, run: TraceRun) -> Played:
        """Answer a trace; all streams come to an end, then the first failure is raised."""
        return self.engine.loop.run_until_complete(self._play(run))

    async def _play(self, run: TraceRun) -> Played:
        submitted = [time.perf_counter()] * len(run.prompts)
        kept, places = await self._places(run)

        async def arrive(index: int) -> Stream:
            if not run.fork:
                await asyncio.sleep(run.at[index] * self.pace)
                submitted[index] = time.perf_counter()
            ids = run.prompts[index][kept:]
            return await self.stream(ids, run.decode[index], **places[index])

        arrivals = (arrive(index) for index in range(len(run.prompts)))
        answers = await asyncio.gather(*arrivals, return_exceptions=True)
        for owner in {place["session_params"]["id"] for place in places if place}:
            await self.verb("close", {"owner": owner})
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return Played(submitted, answers)

    async def _places(self, run: TraceRun) -> tuple[int, list[dict[str, Any]]]:
        """Tokens that are read already, and the request arguments that say where streams begin.

        A stock engine has the tokens of a fork in its prefix cache, ours forks one owner.
        """
        count = len(run.prompts)
        if not run.fork:
            owners = [await self._open() if run.sessions else None for _ in range(count)]
            return 0, [{} if o is None else {"session_params": {"id": o}} for o in owners]
        prefix = run.prompts[0][: run.fork]
        if not self.job.ttt:
            await self.stream(prefix, 1)
            return 0, [{}] * count
        owner = await self._open()
        trunk = f"{owner}-trunk"
        await self.engine.async_generate(
            input_ids=prefix,
            sampling_params={"max_new_tokens": 0},
            rid=trunk,
            session_params={"id": owner},
        )
        place = {"id": owner, "rid": trunk, "offset": run.fork}
        return run.fork, [{"session_params": place}] * count

    async def _open(self) -> str:
        return str((await self.verb("open", {}))["owner"])

    def measure_run(self, run: TraceRun) -> dict[str, Any]:
        """One trace from empty caches."""
        self.flush()
        reset_peaks()
        before = self.info()
        parts = list(map(self._alone, _single(run))) if run.in_turn else [self.play(run)]
        after = self.info()
        timed = in_turn([timing(part.submitted, part.answers) for part in parts])
        answers = [answer for part in parts for answer in part.answers]
        if not self.pace:
            self.pace = timed.decode_seconds / (max(run.decode) - 1)
        return {
            "trace": run.trace,
            "prompt_tokens": sum(map(len, run.prompts)),
            "timing": asdict(timed),
            "outputs": [answer.output for answer in answers],
            "at_once": max(most_at_once(part.answers) for part in parts),
            "peak_mib": peak_mib(),
            "state": state_steps(before, after, answers, list(map(len, run.prompts))),
            **self.counted(before, after),
        }

    def _alone(self, run: TraceRun) -> Played:
        self.flush()
        return self.play(run)

    def counted(self, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
        """What the planner and the failure counters say; empty for a stock engine."""
        if not after:
            return {}
        return {
            "planner": planner_work(before["planner"], after["planner"]),
            "failed_writes": after["counters"]["failed_writes"],
            "retracted": after["counters"]["retracted"] - before["counters"]["retracted"],
        }


def _single(run: TraceRun) -> list[TraceRun]:
    """The streams of a trace as runs of their own."""
    return [
        TraceRun(run.trace, [ids], [decode], [0.0])
        for ids, decode in zip(run.prompts, run.decode, strict=True)
    ]


def planner_work(before: dict[str, Any], after: dict[str, Any]) -> dict[str, int]:
    """Rounds, forward passes, their rows and held stream-rounds of one run; the longest wait of
    the engine."""
    counted = ("rounds", "forwards", "rows", "held")
    return {
        **{name: after[name] - before[name] for name in counted},
        "max_wait": after["max_wait"],
        "wait_budget": after["wait_budget"],
    }


def meet(folder: str, count: int, name: str) -> None:
    """Return when `count` processes have come here; RuntimeError when one does not come."""
    (Path(folder) / name).touch()
    deadline = time.monotonic() + MEET_S
    while len(list(Path(folder).iterdir())) < count:
        if time.monotonic() > deadline or (Path(folder) / FAILED).exists():
            raise RuntimeError(f"not all of {count} engines came up")
        time.sleep(MEET_POLL_S)


def work(job: TraceJob) -> dict[str, Any]:
    """Start the engine, warm it up, run every trace `repeats` times, stop it."""
    bench = TraceBench(job)
    try:
        first = job.runs[0]
        prompts = [ids[:WARMUP_PROMPT] for ids in first.prompts]
        bench.run(prompts, min(*first.decode, WARMUP_TOKENS))
        if job.meet:
            meet(**job.meet)
        runs = [bench.measure_run(run) for _ in range(job.repeats) for run in job.runs]
        return {"runs": runs, "info": bench.info()}
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
