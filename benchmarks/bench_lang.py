"""The frontend: what its verbs take, what siblings gain, what the interpreter costs.

Parts (`--only`), each a table:
  verbs     p50 and p99 of checkpoint, fork, keep and rollback, in process and over HTTP
  siblings  tokens/s of the branches of one prefix, against the same contexts as independent
            requests sent together, and against SGLang's own interpreter and server on the base
            checkpoint; all over HTTP, each from empty caches
  overhead  microseconds per node on a backend that answers at once, ours and SGLang's interpreter

Each server runs in its own process, one after the other, after a warm-up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_serving import base_checkpoint, text_tokens
from common import (
    Spread,
    add_sizes,
    command_line,
    machine,
    machine_line,
    markdown_table,
    new_parser,
    parse_sizes,
    run,
    run_worker,
)
from lang_null import overhead
from lang_worker import VERBS, Job

from sgl_rwttt.models.embedded import ensure

WORKER = Path(__file__).resolve().with_name("lang_worker.py")
TIMEOUT_S = 3600.0
PARTS = ("verbs", "siblings", "overhead")
WAYS = {"engine": "in process", "http": "HTTP"}
KV_SLACK = 1024  # tokens
FULL = {
    "branches": 8,
    "prefix": 2000,
    "decode": 64,
    "context": 256,
    "rounds": 200,
    "nodes": 2000,
    "repeats": 3,
}
QUICK = {
    "branches": 3,
    "prefix": 40,
    "decode": 4,
    "context": 12,
    "rounds": 3,
    "nodes": 40,
    "repeats": 1,
}
_HELP = {
    "branches": "branches of a fork",
    "prefix": "tokens that the siblings share",
    "decode": "tokens generated per sibling",
    "context": "tokens that the verbs are called behind",
    "rounds": "calls of each verb",
    "nodes": "nodes of the programs of part overhead",
    "repeats": "measured runs of parts siblings and overhead",
}


def text_of(model: Path, length: int) -> str:
    """A text of about `length` tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    tokens = text_tokens(model)
    while len(tokens) < length:
        tokens += tokens
    return str(tokenizer.decode(tokens[:length]))


def job_for(options: argparse.Namespace, model: Path, way: str) -> Job:
    """The work of one server."""
    room = options.branches * (options.prefix + options.decode) + options.context + KV_SLACK
    server: dict[str, Any] = {"max_total_tokens": max(4096, room), "log_level": "error"}
    if way != "stock":
        server["ttt_memory_mb"] = 64 if options.quick else 1024
    if options.attention_backend is not None:
        server["attention_backend"] = options.attention_backend
    return Job(
        way=way,
        model=str(model),
        options=server,
        parts=options.only,
        context=text_of(model, options.context),
        rounds=options.rounds,
        prefix=text_of(model, options.prefix),
        branches=options.branches,
        decode=options.decode,
        repeats=options.repeats,
    )


def run_way(options: argparse.Namespace, model: Path, way: str) -> dict[str, Any]:
    """One server's results."""
    print(f"running {way} ...", file=sys.stderr, flush=True)
    job = asdict(job_for(options, model, way))
    return run_worker(WORKER, job, {"OMP_NUM_THREADS": str(options.threads)}, TIMEOUT_S)


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """All parts; the report that `render` prints and `--out` stores."""
    report: dict[str, Any] = {
        "benchmark": "lang",
        "machine": machine(options.threads),
        "command": command_line(__file__, arguments, options.threads),
        "size": {name: getattr(options, name) for name in FULL},
        "attention_backend": options.attention_backend,
    }
    if "overhead" in options.only:
        print("running overhead ...", file=sys.stderr, flush=True)
        report["overhead"] = overhead(options.nodes, options.repeats)
    if not {"verbs", "siblings"} & set(options.only):
        return report
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "embedded":
            model = ensure()
            base = ensure(ttt=False) if "siblings" in options.only else model
        else:
            model = Path(options.model)
            base = base_checkpoint(model, Path(folder))
        ways = ["engine"] if "verbs" in options.only else []
        results = {way: run_way(options, model, way) for way in [*ways, "http"]}
        if "siblings" in options.only:
            stock = run_way(options, base, "stock")
            report["siblings"] = results["http"]["siblings"] | stock["siblings"]
        if "verbs" in options.only:
            report["verbs"] = {way: results[way]["verbs"] for way in WAYS}
    return report


def p99(values: Sequence[float]) -> float:
    """The smallest value that at least 99 % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[-(-99 * len(ordered) // 100) - 1]


def verb_table(report: dict[str, Any]) -> str:
    """One row per verb: p50 and p99 of each way, in ms."""
    header = ["verb", *(f"{text}, {q}, ms" for text in WAYS.values() for q in ("p50", "p99"))]
    rows = []
    for verb in VERBS:
        taken = [report["verbs"][way][verb] for way in WAYS]
        cells = [f"{1e3 * f(each):.2f}" for each in taken for f in (statistics.median, p99)]
        rows.append([verb, *cells])
    return markdown_table(header, rows)


def rate(report: dict[str, Any], kind: str, seconds: str = "seconds") -> Spread | None:
    """Tokens per second of one kind; None where the time was not taken."""
    runs = report["siblings"][kind]
    if seconds not in runs[0]:
        return None
    return Spread.of([run["tokens"] / run[seconds] for run in runs])


def sibling_table(report: dict[str, Any]) -> str:
    """One row per kind: tokens/s with the prefix and behind it, and ours over it."""
    count = report["size"]["branches"]
    kinds = {
        "siblings": f"{count} branches",
        "independent": f"{count} independent requests",
        "stock": f"{count} branches, stock sglang.lang on the base model",
    }
    header = ["", "tokens/s", "behind the prefix, tokens/s", "branches over it", "behind it"]
    rows = []
    for kind, text in kinds.items():
        cells, ratios = [], []
        for seconds in ("seconds", "branch_seconds"):
            ours, theirs = rate(report, "siblings", seconds), rate(report, kind, seconds)
            assert ours is not None
            cells.append("" if theirs is None else theirs.text())
            is_other = theirs is not None and kind != "siblings"
            ratios.append(ours.over(theirs).text(".2f") if is_other and theirs else "")
        rows.append([text, *cells, *ratios])
    return markdown_table(header, rows)


def overhead_table(report: dict[str, Any]) -> str:
    """One row per kind of program."""
    rows = []
    for kind, taken in report["overhead"].items():
        ours, stock = Spread.of(taken["ours"]), Spread.of(taken["stock"])
        cells = [ours.text(".0f"), stock.text(".0f"), ours.over(stock).text(".2f")]
        rows.append([kind, *cells])
    header = ["nodes", "ours, us per node", "stock, us per node", "ours over stock"]
    return markdown_table(header, rows)


def render(report: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    size = report["size"]
    parts = [f"{machine_line(report['machine'])}\n\n`{report['command']}`"]
    if "verbs" in report:
        fork = f"fork({size['branches']})"
        text = f"{size['rounds']} calls of each behind {size['context']} tokens, {fork}"
        parts += [text, verb_table(report)]
    if "siblings" in report:
        attention = report["attention_backend"] or "each server's default"
        text = (
            f"{size['prefix']}-token prefix, {size['decode']} tokens per branch; "
            f"attention backend: {attention}; median of {size['repeats']} runs (smallest..largest)"
        )
        parts += [text, sibling_table(report)]
    if "overhead" in report:
        text = f"About {size['nodes']} nodes, median of {size['repeats']} runs (smallest..largest)"
        parts += [text, overhead_table(report)]
    return "\n\n".join(parts)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with every default filled in; SystemExit for wrong usage."""
    parser = new_parser(__doc__)
    add_sizes(parser, _HELP, FULL, QUICK)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--model", default="embedded", help="`embedded` or a checkpoint folder")
    parser.add_argument("--attention-backend", help="of all servers; default: each one's own")
    options = parse_sizes(parser, arguments, FULL, QUICK)
    if min(getattr(options, name) for name in FULL) < 1 or options.threads < 1:
        parser.error(f"--{', --'.join(FULL)} and --threads must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and store the raw numbers if asked to."""
    run(arguments, parse, measure, render)


if __name__ == "__main__":
    main()
