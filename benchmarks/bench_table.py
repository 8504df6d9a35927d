"""The serving table: serial, replicas, phases, kinds of commit, WRITE traces, stock, sibling forks.

Rows (`--only` takes their names):
  serial    one stream after the other through an engine for one stream (--ttt-mode serial)
  replicas  as many such engines at once as together take the memory that the batch takes
  eager     a loop of transformers with the fast-weight rule, one stream after the other
  phase     READ-only and boundary requests in forward passes of their own, dense commits
  commit    the same with owner commits
  full      full read/write: one forward pass of everybody, owner commits
  bursty, all-update, siblings   other WRITEs, or one prefix for all streams; the rest as full
  stock, stock siblings          SGLang without TTT, on the same checkpoint without TTT
  stock native                   the same with stock's own attention backend for a CPU

All rows have the same dtype, threads and, but for the last, attention backend. The rate is that of
the decode window. Each engine runs in a process of its own, one after the other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_serving import base_checkpoint, make_prompts
from common import (
    WorkerFailed,
    add_sizes,
    command_line,
    last_words,
    machine,
    new_parser,
    parse_sizes,
    run,
)
from table_report import ROWS, plot, render
from table_rows import ENGINES, Bench
from traces import Size

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.srt_ext.launch import engine_defaults, local_config

__all__ = ["main", "measure", "parse", "plot", "render"]

SIZES = {"streams": 8, "prompt": 512, "decode": 128}
QUICK = {"streams": 2, "prompt": 16, "decode": 9}
BUDGETS = {"short": (1, 2), "full": (3, None)}  # (repeats, streams of rows that run in turn)


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """All rows; the report that `render` prints and `--out` stores.

    An engine that fails costs its own rows only, and the report says so.
    """
    facts = machine(options.threads)
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "embedded":
            model, base = ensure(), options.base or ensure(ttt=False)
        else:
            model = Path(options.model)
            base = options.base or base_checkpoint(model, Path(folder))
        backend = options.attention_backend or engine_defaults(model)["attention_backend"]
        options.attention_backend = backend
        chunk = int(local_config(model)["ttt_chunk"])
        size = Size(options.streams, options.prompt, options.decode, chunk)
        prompts = make_prompts(model, size.streams, size.prompt + chunk)
        bench = Bench(options, model, base, size, prompts)
        wanted = {names: work for names, work in ENGINES.items() if set(names) & set(options.only)}
        for number, (names, work) in enumerate(wanted.items(), start=1):
            said = f"{number} of {len(wanted)}: {', '.join(names)} ..."
            print(said, file=sys.stderr, flush=True)
            try:
                work(bench)
            except WorkerFailed as error:
                print(error, file=sys.stderr, flush=True)
                failed |= dict.fromkeys(names, last_words(str(error)))
    return {
        "benchmark": "table",
        "machine": facts,
        "command": command_line(__file__, arguments, options.threads),
        "size": asdict(size),
        "dtype": options.dtype,
        "repeats": options.repeats,
        "attention_backend": options.attention_backend,
        "stock_overlap": options.stock_overlap,
        "replicas": {"matched": bench.matched, "used": bench.used},
        "rows": bench.rows,
        "failed": {name: failed[name] for name in options.only if name in failed},
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with every default filled in; SystemExit for wrong usage."""
    parser = new_parser(__doc__)
    sizes = {
        "streams": "streams of each row",
        "prompt": "tokens of each prompt, before a stream's phase",
        "decode": "tokens generated per stream, the prefill's one included; at least 2",
    }
    add_sizes(parser, sizes, SIZES, QUICK)
    parser.add_argument(
        "--budget",
        choices=tuple(BUDGETS),
        default="short",
        help="short: one run of each row, two streams in the rows that run one after the other "
        "(meant for about ten minutes on two cores); full: three runs, all streams",
    )
    parser.add_argument("--repeats", type=int, help="runs of each row (default: as --budget says)")
    parser.add_argument(
        "--serial-streams",
        type=int,
        help="streams of serial, eager and each replica (default: as --budget says); their rate "
        "does not depend on how many there are",
    )
    parser.add_argument("--replicas", type=int, help="serial engines at once (default: by memory)")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--model", default="embedded", help="`embedded` or a checkpoint folder")
    parser.add_argument("--base", type=Path, help="folder of the same checkpoint without TTT")
    parser.add_argument(
        "--attention-backend", help="of all engines (default: ours on this machine)"
    )
    parser.add_argument(
        "--stock-overlap",
        choices=("on", "off"),
        default="off",
        help="overlap scheduling of the stock rows (default off, as in ours)",
    )
    options = parse_sizes(parser, arguments, SIZES, QUICK)
    repeats, in_turn = BUDGETS[options.budget]
    options.repeats = repeats if options.repeats is None else options.repeats
    if options.serial_streams is None:
        options.serial_streams = in_turn
    numbers = (options.streams, options.prompt, options.repeats, options.threads)
    given = [n for n in (options.serial_streams, options.replicas) if n is not None]
    if min(*numbers, *given) < 1:
        parser.error("all numbers must be at least 1")
    if options.decode < 2:
        parser.error("--decode must be at least 2: the first token belongs to the prefill")
    if "replicas" in options.only and not {"serial", "full"} <= set(options.only):
        parser.error("the row replicas needs the rows serial and full")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if asked to; exits with 1 if an engine failed."""
    report = run(arguments, parse, measure, render)
    if report["failed"]:
        sys.exit(1)
    return report


if __name__ == "__main__":
    main()
