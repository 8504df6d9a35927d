"""One stream of a TTT-Linear checkpoint through SGLang: what a token costs at 1k and at 32k.

    python benchmarks/bench_streaming.py            # up to 32,768 tokens
    python benchmarks/bench_streaming.py --quick    # does it run? The numbers mean nothing

Reads one stream of tokens in parts, each a longer prefix of it, and generates some tokens after
each. A part starts from the state at the end of the part before (a prefix hit), so every token is
read once. Prints, per depth, the time per token read and generated and the memory of the scheduler
process (resident set). One request at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import add_run_flags, command_line, machine, machine_line, markdown_table, run
from plots import new_figure, save

MODEL = Path(__file__).resolve().parents[1] / "tests/data/golden/ttt_linear_full"
SLOTS = {"page": "page", "version": "base"}  # our word -> the pool's
INTERVAL = 64  # tokens between two reports of a request


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint folder")
    parser.add_argument(
        "--depths",
        type=int,
        nargs="+",
        default=[1024, 2048, 4096, 8192, 16384, 32256],
        help="tokens of the stream that are read when tokens are generated, ascending",
    )
    parser.add_argument("--generate", type=int, default=512, help="tokens generated at each depth")
    parser.add_argument("--memory-mb", type=int, default=16, help="--ttt-memory-mb")
    add_run_flags(parser)
    parser.add_argument("--quick", action="store_true", help="256 tokens")
    args = parser.parse_args(argv)
    if not (args.model / "config.json").is_file():
        parser.error(f"--model {args.model} is no checkpoint folder; the default is in a checkout")
    if args.quick:
        args.depths, args.generate = [64, 128], 128
    return args


def open_engine(args: argparse.Namespace) -> Any:
    """An engine on the checkpoint with room for the stream."""
    from sgl_rwttt.srt_ext.launch import prepare_environment
    from sgl_rwttt.srt_ext.options import TTTOptions

    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    prepare_environment()
    TTTOptions(memory_mb=args.memory_mb).publish()
    import sglang

    length = args.depths[-1] + args.generate + 16
    return sglang.Engine(
        model_path=str(args.model),
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        json_model_override_args=json.dumps({"max_position_embeddings": length}),
        max_total_tokens=length + len(args.depths) * args.generate,
        max_running_requests=2,
        chunked_prefill_size=4096,
        stream_interval=INTERVAL,
        log_level="error",
    )


def scheduler_memory() -> int:
    """Resident bytes of the scheduler: of our processes the one that holds the model."""
    import psutil

    children = psutil.Process().children(recursive=True)
    named = [p for p in children if "scheduler" in " ".join(p.cmdline())]
    return max(p.memory_info().rss for p in (named or children))


def follow(engine: Any, prompt: list[int], count: int) -> list[tuple[float, int]]:
    """(seconds since submission, tokens generated) at every report of one request."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": count}
    start, points = time.perf_counter(), []
    for chunk in engine.generate(input_ids=prompt, sampling_params=sampling, stream=True):
        done = int(chunk["meta_info"]["completion_tokens"])
        points.append((time.perf_counter() - start, done))
        cached = int(chunk["meta_info"]["cached_tokens"])
    return [(0.0, cached), *points]


def depth_costs(depth: int, points: Sequence[tuple[float, int]]) -> dict[str, float]:
    """Milliseconds per token read and generated, from what `follow` returns."""
    (_, cached), (first, one), (last, all_of_them) = points[0], points[1], points[-1]
    return {
        "depth": depth,
        "read": depth - cached,
        "read_ms": 1000 * first / (depth - cached),
        "generate_ms": 1000 * (last - first) / (all_of_them - one),
    }


def measure(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Read the stream on one engine, after a warm-up."""
    from sgl_rwttt.srt_ext.control import control

    rng = random.Random(0)
    stream = [rng.randrange(3, 128) for _ in range(args.depths[-1])]
    facts, rows = machine(args.threads), []
    engine = open_engine(args)
    try:
        follow(engine, [5] * 64, 2 * INTERVAL)  # warm-up
        for depth in args.depths:
            costs = depth_costs(depth, follow(engine, stream[:depth], args.generate))
            rows.append({**costs, "mb": scheduler_memory() / 2**20})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        verb = control(engine.tokenizer_manager, "info", {})
        info = engine.loop.run_until_complete(verb)
    finally:
        engine.shutdown()
    return {
        "machine": facts,
        "command": command_line("bench_streaming.py", argv, args.threads),
        "rows": rows,
        "bytes": {name: info["pools"][f"{slot}_bytes"] for name, slot in SLOTS.items()},
    }


def render(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    header = ["tokens of the context", "read now", "ms per token read", "generated", "MiB"]
    rows = [
        [
            f"{row['depth']:,}",
            f"{row['read']:,}",
            f"{row['read_ms']:.2f}",
            f"{row['generate_ms']:.2f}",
            f"{row['mb']:.0f}",
        ]
        for row in report["rows"]
    ]
    size = report["bytes"]
    return "\n\n".join(
        [
            machine_line(report["machine"]),
            f"`{report['command']}`",
            markdown_table(header, rows),
            f"A context holds one version of {size['version']:,} bytes and a tail of "
            f"{size['page']:,} bytes.",
        ]
    )


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """Milliseconds per token, and memory, against the context: `streaming-depth.png`."""
    rows = report["rows"]
    depths = [row["depth"] for row in rows]
    figure = new_figure("One long stream of a TTT-Linear model", width=8.0)
    times, memory = figure.subplots(1, 2)
    for key, label in (("read_ms", "read"), ("generate_ms", "generated")):
        times.plot(depths, [row[key] for row in rows], marker="o", label=label)
    memory.plot(depths, [row["mb"] for row in rows], marker="o")
    times.set_ylabel("ms per token")
    times.legend()
    memory.set_ylabel("scheduler process, MiB")
    for axes in (times, memory):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of the context")
        axes.set_ylim(bottom=0)
    return [save(figure, folder / "streaming-depth.png")]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if asked to."""
    return run(arguments, parse, measure, render)


if __name__ == "__main__":
    main()
