"""Scaling: 1 to 32 streams at several prompt lengths, the memory frontier, data parallel.

One engine with `--memory-mb` of state memory answers ever more streams together at each prompt
length. A point is feasible when all its streams were in progress at once and none was retracted
or refused. Where one is not, the largest number of streams that is feasible is searched: that is
the frontier. What private dense weights would hold in the same memory is computed.

With `--dp 1 2` an engine of each data-parallel size answers the same number of streams per rank,
each in a session of its own. All ranks have the same number of threads.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_modes import QUICK_STATE_MB, Setup, engine_options, state_options
from bench_modes import WORKER as ENGINE
from bench_serving import KV_SLACK, TIMEOUT_S, make_prompts
from common import (
    WorkerFailed,
    add_sizes,
    command_line,
    last_words,
    machine,
    new_parser,
    parse_sizes,
    run,
    run_worker,
)
from modes_worker import TraceJob, TraceRun
from scaling_report import plot, render
from scaling_worker import ScalingJob

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.srt_ext.launch import engine_defaults, local_config

__all__ = ["main", "measure", "parse", "plot", "render"]

WORKER = Path(__file__).resolve().with_name("scaling_worker.py")
FULL = {"streams": [1, 2, 4, 8, 16, 32], "prompts": [128, 512, 1024], "decode": 33}
QUICK = {"streams": [1, 2], "prompts": [16, 24], "decode": 9}
MEMORY_MB = 512
DP_LOADS = 2  # streams per rank: so many of the largest that leave room for all ranks


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """All points; the report that `render` prints and `--out` stores."""
    facts = machine(options.threads)
    model = ensure() if options.model == "embedded" else Path(options.model)
    options.attention_backend = (
        options.attention_backend or engine_defaults(model)["attention_backend"]
    )
    context = int(local_config(model)["max_position_embeddings"])
    lengths = [length for length in options.prompts if length + options.decode <= context]
    prompts = make_prompts(model, options.streams[-1], max(lengths, default=1))
    report: dict[str, Any] = {
        "benchmark": "scaling",
        "machine": facts,
        "command": command_line(__file__, arguments, options.threads),
        "streams": options.streams,
        "prompts": options.prompts,
        "decode": options.decode,
        "dtype": options.dtype,
        "repeats": options.repeats,
        "attention_backend": options.attention_backend,
        "memory_mb": options.memory_mb,
        "context": context,
    }
    result = grid(options, model, prompts, lengths)
    report["columns"], report["pools"] = result["columns"], result["info"]["pools"]
    if options.dp:
        report["dp"] = data_parallel(options, model, prompts, lengths[0])
    return report


def engine_job(
    options: argparse.Namespace, model: Path, streams: int, longest: int, **more: Any
) -> TraceJob:
    """An engine with KV for all streams, so that the state memory is what may not suffice."""
    room = streams * (longest + options.decode) + KV_SLACK
    engine = engine_options(
        model,
        options.dtype,
        streams,
        room,
        attention_backend=options.attention_backend,
        **more,
    )
    state = state_options(Setup(), options.memory_mb)
    return TraceJob(str(model), engine, state, [], options.repeats)


def grid(
    options: argparse.Namespace, model: Path, prompts: list[list[int]], lengths: list[int]
) -> dict[str, Any]:
    """Every prompt length on one engine."""
    said = f"{len(lengths)} prompt lengths, up to {options.streams[-1]} streams ..."
    print(said, file=sys.stderr, flush=True)
    engine = asdict(engine_job(options, model, options.streams[-1], max(lengths)))
    del engine["runs"], engine["repeats"]
    job = ScalingJob(engine, prompts, options.streams, lengths, options.decode, options.repeats)
    variables = {"OMP_NUM_THREADS": str(options.threads), "PYTHONWARNINGS": "ignore"}
    return run_worker(WORKER, asdict(job), variables, TIMEOUT_S, live=True)


def data_parallel(
    options: argparse.Namespace, model: Path, prompts: list[list[int]], length: int
) -> dict[str, Any]:
    """An engine of each size with the same streams per rank; what a launch refuses is its row."""
    most = max(options.dp)
    loads = [n for n in options.streams if n * most <= options.streams[-1]][-DP_LOADS:]
    threads = max(1, options.threads // most)
    rows: list[dict[str, Any]] = []
    for ranks in options.dp:
        print(f"data parallel {ranks} ...", file=sys.stderr, flush=True)
        streams = [ranks * load for load in loads]
        job = engine_job(options, model, max(streams), length, **dp_options(ranks))
        runs = [session_run(prompts[:count], length, options.decode) for count in streams]
        job = TraceJob(job.model, job.options, job.state, runs, job.repeats, ttt=False)
        try:
            variables = {"OMP_NUM_THREADS": str(threads)}
            found = run_worker(ENGINE, asdict(job), variables, TIMEOUT_S)["runs"]
        except WorkerFailed as error:
            rows.append({"ranks": ranks, "refused": last_words(str(error))})
            continue
        for load, count in zip(loads, streams, strict=True):
            mine = [r for r in found if r["trace"] == str(count)]
            rows.append({"ranks": ranks, "load": load, "runs": mine})
    return {"threads": threads, "prompt": length, "rows": rows}


def dp_options(ranks: int) -> dict[str, Any]:
    """Engine arguments of a data-parallel size; none for one rank, which needs nothing."""
    return {} if ranks == 1 else {"dp_size": ranks}


def session_run(prompts: Sequence[list[int]], length: int, decode: int) -> TraceRun:
    """Streams that each have an owner, whose rank is the one that keeps its state."""
    count = len(prompts)
    cut = [ids[:length] for ids in prompts]
    return TraceRun(str(count), cut, [decode] * count, [0.0] * count, sessions=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with every default filled in; SystemExit for wrong usage."""
    parser = new_parser(__doc__)
    lists = {"streams": "numbers of streams", "prompts": "prompt lengths, tokens"}
    add_sizes(parser, lists, FULL, QUICK, nargs="+")
    parser.add_argument("--decode", type=int, help=f"tokens per stream (default {FULL['decode']})")
    parser.add_argument("--memory-mb", type=int, help=f"state memory, MiB (default {MEMORY_MB})")
    parser.add_argument(
        "--dp", type=int, nargs="+", metavar="RANKS", help="data-parallel sizes (default: none)"
    )
    parser.add_argument("--repeats", type=int, default=1, help="runs of each point (default 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--model", default="embedded", help="`embedded` or a checkpoint folder")
    parser.add_argument("--attention-backend", help="default: ours on this machine")
    options = parse_sizes(parser, arguments, FULL, QUICK)
    if options.memory_mb is None:
        options.memory_mb = QUICK_STATE_MB if options.quick else MEMORY_MB
    options.streams = sorted({1, *options.streams})
    options.prompts = sorted(set(options.prompts))
    numbers = (*options.streams, *options.prompts, *(options.dp or [1]))
    if min(*numbers, options.memory_mb, options.repeats, options.threads) < 1:
        parser.error("all numbers must be at least 1")
    if options.decode < 2:
        parser.error("--decode must be at least 2: the first token belongs to the prefill")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if asked to."""
    return run(arguments, parse, measure, render)


if __name__ == "__main__":
    main()
