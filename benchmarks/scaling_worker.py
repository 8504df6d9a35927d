"""One engine at many sizes, up to what its state memory holds: `scaling_worker.py JOB RESULT`.

Started by bench_scaling.py. Importing this file costs nothing heavy: SGLang's own processes import
it again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_worker import WARMUP_TOKENS
from modes_worker import WARMUP_PROMPT, TraceBench, TraceJob, TraceRun

REFUSAL = "StateCapacity"
Point = dict[str, Any]  # streams, prompt, runs, fits; what was refused, if something was


@dataclass(frozen=True)
class ScalingJob:
    """What one engine is asked to do; plain values, it travels as JSON."""

    engine: dict[str, Any]  # fields of a TraceJob without runs
    prompts: list[list[int]]  # the largest number of streams, the longest prompt
    streams: list[int]  # ascending
    lengths: list[int]  # of prompts
    decode: int
    repeats: int


class ScalingBench(TraceBench):
    """An engine that is asked for ever more streams."""

    def __init__(self, job: ScalingJob) -> None:
        super().__init__(TraceJob(**job.engine, runs=[], repeats=job.repeats))
        self.asked = job

    def point(self, streams: int, length: int) -> Point:
        """All runs of one size; it fits when all streams ran together, each from its start on."""
        prompts = [ids[:length] for ids in self.asked.prompts[:streams]]
        name = f"{streams} x {length}"
        run = TraceRun(name, prompts, [self.asked.decode] * streams, [0.0] * streams)
        point: Point = {"streams": streams, "prompt": length, "runs": [], "fits": True}
        for _ in range(self.asked.repeats):
            try:
                measured = self.measure_run(run)
            except (RuntimeError, ValueError) as error:
                if REFUSAL not in str(error):
                    raise
                return {**point, "fits": False, "refused": str(error)}
            del measured["outputs"]
            point["runs"].append(measured)
            point["fits"] &= measured["at_once"] == streams and not measured["retracted"]
        return point

    def column(self, length: int) -> dict[str, Any]:
        """One prompt length: the sizes asked for while they fit, then where it stops."""
        points: list[Point] = []
        fitting = 0
        for streams in self.asked.streams:
            print(f"{streams} x {length} ...", file=sys.stderr, flush=True)
            points.append(self.point(streams, length))
            if not points[-1]["fits"]:
                fits, probes = frontier(lambda n: self.point(n, length), fitting, points[-1])
                return {"prompt": length, "points": points, "probes": probes, "fits": fits}
            fitting = streams
        return {"prompt": length, "points": points, "probes": [], "fits": fitting}


def frontier(
    measure: Callable[[int], Point], fitting: int, failed: Point
) -> tuple[int, list[Point]]:
    """The most streams that fit, more than which do not, and the points measured to find it.

    `fitting` streams fit and those of `failed` do not. How many ran at once there is tried first.
    """
    low, high, hint = fitting, failed["streams"], at_once(failed)
    probes: list[Point] = []
    while high - low > 1:
        near = [n for n in (hint, hint + 1) if low < n < high]
        probes.append(measure(near[0] if near else (low + high) // 2))
        if probes[-1]["fits"]:
            low = probes[-1]["streams"]
        else:
            high = probes[-1]["streams"]
    return low, probes


def at_once(point: Point) -> int:
    """Streams that ran together in the worst run of a point; 0 when one was refused."""
    return 0 if "refused" in point else min(run["at_once"] for run in point["runs"])


def work(job: ScalingJob) -> dict[str, Any]:
    """Start the engine, warm it up, measure every prompt length, stop it."""
    bench = ScalingBench(job)
    try:
        warm = [ids[:WARMUP_PROMPT] for ids in job.prompts[:1]]
        bench.run(warm, min(job.decode, WARMUP_TOKENS))
        columns = [bench.column(length) for length in job.lengths]
        return {"columns": columns, "info": bench.info()}
    finally:
        bench.engine.shutdown()


def main() -> None:
    """Read the job, write the result; a failure leaves no result and a traceback in the log."""
    from sgl_rwttt.srt_ext.launch import prepare_environment

    prepare_environment()
    job = ScalingJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(work(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
