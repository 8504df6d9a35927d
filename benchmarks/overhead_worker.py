"""One stream at a time, by an engine or by the eager loop, as often as asked.

Started by bench_overhead.py through live_worker.py. Importing this file costs nothing heavy:
SGLang's own processes import it again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from eager_worker import EagerLoop
from engine_worker import WARMUP_TOKENS, Bench, Job, Stream
from live_worker import serve

Answer = tuple[float, Stream]  # time of submission, stream


def start(job: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers a question of `prompt` and `decode`; warmed up."""
    run = eager(job) if job["eager"] else engine(job)
    run(job["prompt"], WARMUP_TOKENS)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        return times(*run(question["prompt"], question["decode"]))

    return answer


def eager(job: dict[str, Any]) -> Callable[[list[int], int], Answer]:
    """The loop of transformers."""
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    loop = EagerLoop(Path(job["model"]), job["dtype"])
    return lambda prompt, decode: (time.perf_counter(), loop.stream(prompt, decode))


def engine(job: dict[str, Any]) -> Callable[[list[int], int], Answer]:
    """An engine of ours or stock's, from empty caches each time."""
    from sgl_rwttt.srt_ext.launch import prepare_environment

    prepare_environment()
    bench = Bench(Job(job["model"], job["options"], job["state"], job["ttt"], [], 0, 1, []))

    def run(prompt: list[int], decode: int) -> Answer:
        bench.flush()
        begun, (stream,) = bench.run([prompt], decode)
        return begun, stream

    return run


def times(begun: float, stream: Stream) -> dict[str, Any]:
    """Seconds of the prefill and of a decode step, on average and the median one; the tokens."""
    arrivals = stream.arrivals
    (first, one), (last, count) = arrivals[0], arrivals[-1]
    steps = [
        (after - before) / (later - earlier)
        for (before, earlier), (after, later) in pairwise(arrivals)
    ]
    return {
        "prefill": first - begun,
        "decode": (last - first) / (count - one),
        "median_step": median(steps),
        "output": stream.output,
    }


if __name__ == "__main__":
    serve(start)
