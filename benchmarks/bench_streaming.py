"""One long stream of a TTT-Linear checkpoint through SGLang: what a token costs at 32k.

    python benchmarks/bench_streaming.py            # 16,384 tokens read, 16,384 generated
    python benchmarks/bench_streaming.py --quick    # does it run? The numbers mean nothing

Prints time per generated token and the memory of the scheduler process (resident set) per window
of the stream, and what the state runtime holds at the end. Numbers of one request; other requests
do not run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from common import command_line, machine, machine_line, markdown_table, write_json

MODEL = Path(__file__).resolve().parents[1] / "tests/data/golden/ttt_linear_full"
INTERVAL = 64  # tokens between two reports of the stream


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint folder")
    parser.add_argument("--read", type=int, default=16384, help="tokens of the prompt")
    parser.add_argument("--generate", type=int, default=16384, help="tokens generated after it")
    parser.add_argument("--windows", type=int, default=8, help="rows of the table")
    parser.add_argument("--memory-mb", type=int, default=64, help="--ttt-memory-mb")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--quick", action="store_true", help="128 + 256 tokens")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args(argv)
    if args.quick:
        args.read, args.generate, args.windows = 128, 256, 2
    return args


def open_engine(args: argparse.Namespace) -> Any:
    """An engine on the checkpoint with room for the stream."""
    from sgl_rwttt.srt_ext.launch import prepare_environment
    from sgl_rwttt.srt_ext.options import TTTOptions

    prepare_environment()
    TTTOptions(memory_mb=args.memory_mb).publish()
    import sglang

    length = args.read + args.generate + 16
    return sglang.Engine(
        model_path=str(args.model),
        skip_tokenizer_init=True,
        device="cpu",
        dtype="float32",
        json_model_override_args=json.dumps({"max_position_embeddings": length}),
        max_total_tokens=length + 1024,
        max_running_requests=2,
        chunked_prefill_size=4096,
        stream_interval=INTERVAL,
    )


def scheduler_memory() -> int:
    """Resident bytes of the scheduler: of our processes the one that holds the model."""
    import psutil

    children = psutil.Process().children(recursive=True)
    named = [p for p in children if "scheduler" in " ".join(p.cmdline())]
    return max(p.memory_info().rss for p in (named or children))


def follow(engine: Any, args: argparse.Namespace) -> list[tuple[float, int, int]]:
    """(seconds, tokens generated, resident bytes) at every report of the stream."""
    rng = random.Random(0)
    prompt = [rng.randrange(3, 128) for _ in range(args.read)]
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": args.generate}
    start, points = time.perf_counter(), []
    for chunk in engine.generate(input_ids=prompt, sampling_params=sampling, stream=True):
        count = int(chunk["meta_info"]["completion_tokens"])
        points.append((time.perf_counter() - start, count, scheduler_memory()))
    return points


def windows(points: Sequence[tuple[float, int, int]], count: int) -> list[dict[str, float]]:
    """The stream in ``count`` parts of about equal length; ValueError for too few reports."""
    if len(points) < 2 * count:
        raise ValueError(f"{len(points)} reports are too few for {count} windows")
    edges = [points[i * (len(points) - 1) // count] for i in range(count + 1)]
    return [
        {
            "first": a[1],
            "last": b[1],
            "ms": 1000 * (b[0] - a[0]) / (b[1] - a[1]),
            "mb": b[2] / 2**20,
        }
        for a, b in pairwise(edges)
    ]


def measure(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Run the stream on one engine."""
    from sgl_rwttt.srt_ext.control import control

    engine = open_engine(args)
    try:
        points = follow(engine, args)
        verb = control(engine.tokenizer_manager, "info", {})
        info = engine.loop.run_until_complete(verb)
    finally:
        engine.shutdown()
    return {
        "machine": machine(args.threads),
        "command": command_line("bench_streaming.py", argv, args.threads),
        "read": args.read,
        "read_seconds": points[0][0],
        "windows": windows(points, args.windows),
        "store": info["store"],
        "bytes": {"page": info["page_bytes"], "version": info["base_bytes"]},
    }


def render(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows = [
        [
            f"{report['read'] + int(w['first'])} to {report['read'] + int(w['last'])}",
            f"{w['ms']:.2f}",
            f"{w['mb']:.0f}",
        ]
        for w in report["windows"]
    ]
    size = report["bytes"]
    return "\n\n".join(
        [
            machine_line(report["machine"]),
            f"`{report['command']}`",
            f"First token after {report['read_seconds']:.1f} s ({report['read']} tokens read).",
            markdown_table(["tokens of the context", "ms per token", "scheduler, MiB"], rows),
            f"A context holds one version of {size['version']} bytes and a tail of "
            f"{size['page']} bytes; {report['store']['evictions']} older ones were evicted.",
        ]
    )


def main() -> None:
    """Measure and print."""
    argv = sys.argv[1:]
    args = parse(argv)
    report = measure(args, argv)
    print(render(report))
    write_json(args.json, report)


if __name__ == "__main__":
    main()
