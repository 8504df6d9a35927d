"""Traces, execution modes, kinds of commit and wait budgets on the real engine.

Parts (`--only`), each a table:
  traces  uniform, bursty-update, all-update, poisson, phase-skew, heterogeneous, against uniform
  modes   --ttt-mode rw, phase and serial
  commit  --ttt-commit owner and dense
  wait    --ttt-wait-budget 0, 1, 2, 4, 8, 16 on the phase-skew trace
  costs   seconds per forward pass, row, WRITE group and write, fitted for simulation.py

traces.py defines the traces. Prompts and greedy decoding are those of bench_serving.py. One engine
runs all traces of equal options, each engine in its own process, one after the other. Options
change when a stream runs, never what it generates: its tokens are compared with those of the first
run of the same trace, and the tables say how many streams differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench_serving import KV_SLACK, TIMEOUT_S, make_prompts
from common import (
    add_sizes,
    command_line,
    machine,
    new_parser,
    parse_sizes,
    run,
    run_worker,
)
from costs import Costs, fitted_costs
from modes_report import plot as plot
from modes_report import render
from modes_worker import TraceJob, TraceRun
from simulation import Simulation
from traces import DEFAULT, TRACES, Size, Trace

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.srt_ext.launch import MIN_KV_TOKENS, engine_defaults, local_config
from sgl_rwttt.srt_ext.options import MODES

WORKER = Path(__file__).resolve().with_name("modes_worker.py")
PARTS = ("traces", "modes", "commit", "wait", "costs")
BUDGETS = (0, 1, 2, 4, 8, 16)
FULL = {"streams": DEFAULT.streams, "prompt": DEFAULT.prompt, "decode": DEFAULT.decode}
QUICK = {"streams": 4, "prompt": 16, "decode": 9}
STATE_MB, QUICK_STATE_MB = 2048, 64
FEWER = (1, 2, 4)  # streams of the uniform trace that tell a row from a forward pass


@dataclass(frozen=True)
class Setup:
    """Options of one engine."""

    mode: str = "rw"
    wait_budget: int = 0
    commit: str = "owner"
    chunk: int | None = None  # instead of the checkpoint's


ALL_UPDATE = Setup(chunk=1)
UNEVEN = ("poisson", "phase-skew", "heterogeneous")


def wanted(options: argparse.Namespace) -> dict[Setup, list[str]]:
    """The traces that each engine runs, in order; a trace with arrivals is never the first."""
    plain, pair = Setup(), ["uniform", "bursty-update"]
    few = [f"uniform x{n}" for n in FEWER if n < options.streams]
    parts: dict[str, list[tuple[Setup, list[str]]]] = {
        "traces": [(plain, [*pair, *UNEVEN]), (ALL_UPDATE, ["all-update"])],
        "modes": [(Setup(m), pair if m != "serial" else pair[:1]) for m in MODES],
        "commit": [(Setup(commit=c), pair) for c in ("owner", "dense")],
        "wait": [(Setup(options.wait_mode, w), ["phase-skew"]) for w in options.budgets],
        "costs": [(plain, [*pair, *few]), (ALL_UPDATE, ["all-update"])],
    }
    asked: dict[Setup, list[str]] = {}
    for part in options.only:
        for setup, names in parts[part]:
            known = asked.setdefault(setup, [])
            known += [name for name in names if name not in known]
    return asked


def trace_of(name: str, size: Size, seed: int) -> Trace:
    """A trace by its name; `uniform xN` is the first N streams of the uniform one."""
    kind, _, count = name.partition(" x")
    trace = TRACES[kind](size, seed)
    return replace(trace, name=name, streams=trace.streams[: int(count)]) if count else trace


def job_for(
    options: argparse.Namespace, model: Path, size: Size, setup: Setup, names: Sequence[str]
) -> TraceJob:
    """The work of one engine."""
    traces = [trace_of(name, size, options.seed) for name in names]
    longest = size.prompt + size.chunk
    prompts = make_prompts(model, size.streams, longest)
    room = size.streams * (longest + 2 * size.decode) + KV_SLACK
    return TraceJob(
        model=str(model),
        options=engine_options(model, options.dtype, size.streams, room, setup.chunk),
        state=state_options(setup, QUICK_STATE_MB if options.quick else STATE_MB),
        runs=[run_of(trace, prompts) for trace in traces],
        repeats=options.repeats,
    )


def engine_options(
    model: Path, dtype: str, streams: int, room: int, chunk: int | None = None, **more: Any
) -> dict[str, Any]:
    """Keyword arguments of an engine for `streams` streams with `room` tokens of KV together.

    `chunk` is used instead of the checkpoint's.
    """
    engine = engine_defaults(
        model,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_total_tokens=max(MIN_KV_TOKENS, room),
        max_running_requests=streams,
        **more,
    )
    if chunk is not None:
        engine["json_model_override_args"] = json.dumps({"ttt_chunk": chunk})
    del engine["model_path"]
    return engine


def state_options(setup: Setup, memory_mb: int) -> dict[str, Any]:
    """The `ttt_*` options of an engine."""
    return {
        "ttt_memory_mb": memory_mb,
        "ttt_mode": setup.mode,
        "ttt_wait_budget": setup.wait_budget,
        "ttt_commit": setup.commit,
    }


def run_of(trace: Trace, prompts: Sequence[list[int]]) -> TraceRun:
    """A trace with token ids: the beginnings of `prompts`, one for each stream or more."""
    return TraceRun(
        trace.name,
        [ids[: s.prompt] for ids, s in zip(prompts, trace.streams, strict=False)],
        [s.decode for s in trace.streams],
        [s.at for s in trace.streams],
    )


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """All engines, one after the other; the report that `render` prints and `--out` stores."""
    facts = machine(options.threads)
    model = ensure() if options.model == "embedded" else Path(options.model)
    chunk = int(local_config(model)["ttt_chunk"])
    size = Size(options.streams, options.prompt, options.decode, chunk)
    runs: list[dict[str, Any]] = []
    engines = wanted(options)
    for number, (setup, names) in enumerate(engines.items(), start=1):
        said = f"engine {number} of {len(engines)}: {setup}, {', '.join(names)} ..."
        print(said, file=sys.stderr, flush=True)
        job = job_for(options, model, size, setup, names)
        env = {"OMP_NUM_THREADS": str(options.threads)}
        result = run_worker(WORKER, asdict(job), env, TIMEOUT_S)
        for one in result["runs"]:
            counts = simulated(trace_of(one["trace"], size, options.seed), setup)
            runs.append({"setup": asdict(setup), "simulated": counts, **one})
    report = {
        "benchmark": "modes",
        "machine": facts,
        "command": command_line(__file__, arguments, options.threads),
        "parts": options.only,
        "dtype": options.dtype,
        "seed": options.seed,
        "size": asdict(size),
        "wait_mode": options.wait_mode,
        "runs": compared(runs),
    }
    if "costs" in options.only:
        report["costs"] = fitted_costs(report["runs"])
    return report


def simulated(trace: Trace, setup: Setup) -> dict[str, int] | None:
    """What simulation.py says the engine does; None when it depends on the time of arrivals."""
    if any(stream.at for stream in trace.streams):
        return None
    outcome = Simulation(trace, Costs(), setup.mode, setup.wait_budget).run()
    return asdict(outcome.counts)


def compared(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs with `differing`: the streams with other tokens than in the trace's first run."""
    first: dict[str, list[list[int]]] = {}
    for one in runs:
        reference = first.setdefault(one["trace"], one["outputs"])
        pairs = zip(reference, one["outputs"], strict=True)
        one["differing"] = sum(mine != theirs for mine, theirs in pairs)
    return runs


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with every default filled in; SystemExit for wrong usage."""
    parser = new_parser(__doc__)
    sizes = {
        "streams": "streams of each trace",
        "prompt": "tokens of each prompt, before a stream's phase",
        "decode": "mean tokens generated per stream, the prefill's one included; at least 2",
    }
    add_sizes(parser, sizes, FULL, QUICK)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each trace (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the traces (default 0)")
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS), metavar="W")
    parser.add_argument("--wait-mode", choices=("rw", "phase"), default="rw", help="of part wait")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--model", default="embedded", help="`embedded` or a checkpoint folder")
    options = parse_sizes(parser, arguments, FULL, QUICK)
    if min(options.streams, options.prompt, options.repeats, options.threads) < 1:
        parser.error("--streams, --prompt, --repeats and --threads must be at least 1")
    if options.decode < 2 or min(options.budgets) < 0:
        parser.error("--decode must be at least 2, --budgets at least 0")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if asked to."""
    return run(arguments, parse, measure, render)


if __name__ == "__main__":
    main()
