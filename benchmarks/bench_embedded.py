"""The embedded model through the served engine: what a document teaches it, and for how long.

Parts (`--only`):
  table      a document is read and its context dropped: the loss of the same text (re-read), of
             what follows it (continuation) and of a document of another kind (unrelated), each in
             an empty context
  stability  one owner reads a long stream in contexts that are dropped: how far each layer's
             weights have moved, and the losses, against the tokens written

The stream is safe as long as, at every point so far, unrelated texts have lost no more than a share
of their loss (`--tolerance`) and the context that was just read is not dearer than with untouched
weights. documents.py has the texts; the model was fitted to none of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import (
    add_sizes,
    command_line,
    machine,
    new_parser,
    parse_sizes,
    run,
    run_worker,
)
from documents import documents, stream
from embedded_report import plot, render

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.models.held_out import LENGTH
from sgl_rwttt.srt_ext.launch import local_config

WORKER = Path(__file__).resolve().with_name("embedded_worker.py")
TIMEOUT_S = 4 * 3600.0
__all__ = ["main", "plot", "render"]

PARTS = ("table", "stability")
KINDS = ("glossary", "code", "prose")
STREAMS = ("code", "prose")
FULL = {"documents": 12, "first": LENGTH, "second": 192, "tokens": 32768, "judges": 4}
QUICK = {"documents": 2, "first": 64, "second": 20, "tokens": 256, "judges": 2}


def points(contexts: int) -> list[int]:
    """Numbers of contexts after which is measured: 1, 2, 3, 4, 6, 8, 12, ... and the last."""
    steps = {step for power in range(contexts.bit_length()) for step in (1 << power, 3 << power)}
    return sorted({step for step in steps if step < contexts} | {contexts})


def others(kinds: Sequence[str], kind: str) -> list[str]:
    """The kinds behind this one, in a circle."""
    at = list(kinds).index(kind)
    return [*kinds[at + 1 :], *kinds[:at]]


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Both parts in one engine; the report that `render` prints."""
    from tokenizers import Tokenizer

    facts, model = machine(options.threads), ensure()
    tokenizer, first = Tokenizer.from_file(str(model / "tokenizer.json")), options.first
    length = first + options.second
    given = {kind: documents(kind, tokenizer, options.documents, length) for kind in KINDS}
    contexts = options.tokens // first
    job: dict[str, Any] = {
        "model": str(model),
        "options": {"max_total_tokens": 8192, "ttt_memory_mb": 512},
        "layers": local_config(model)["ttt_layers"],
        "first": first,
        "points": points(contexts),
        "table": {},
        "stability": {},
    }
    if "table" in options.only:
        for kind in KINDS:
            neighbours = given[others(KINDS, kind)[0]]
            pairs = zip(given[kind], neighbours, strict=True)
            job["table"][kind] = [(ids, other[:first]) for ids, other in pairs]
    if "stability" in options.only:
        for kind in options.streams:
            judges = [
                ids[:first]
                for pair in zip(*(given[k] for k in others(KINDS, kind)), strict=True)
                for ids in pair
            ]
            ids = stream(kind, tokenizer, (contexts + 1) * first)
            job["stability"][kind] = {"ids": ids, "unrelated": judges[: options.judges]}
    print("running ...", file=sys.stderr, flush=True)
    result = run_worker(WORKER, job, {"OMP_NUM_THREADS": str(options.threads)}, TIMEOUT_S)
    return {
        "benchmark": "embedded",
        "machine": facts,
        "command": command_line(__file__, arguments, options.threads),
        "quick": options.quick,
        "size": {name: getattr(options, name) for name in FULL},
        "tolerance": options.tolerance,
        "layers": job["layers"],
        **result,
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with every default filled in; SystemExit for wrong usage."""
    parser = new_parser(__doc__)
    texts = {
        "documents": "documents of each kind",
        "first": "tokens of a document that are read, and of a context of the stream",
        "second": "tokens behind them",
        "tokens": "tokens of the stream",
        "judges": "unrelated documents beside the stream",
    }
    add_sizes(parser, texts, FULL, QUICK)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=list(STREAMS))
    parser.add_argument("--tolerance", type=float, default=0.01, help="default 0.01, which is 1 %%")
    options = parse_sizes(parser, arguments, FULL, QUICK)
    if options.documents < 2 or options.judges < 1 or options.threads < 1:
        parser.error("--documents must be at least 2, --judges and --threads at least 1")
    if options.judges > 2 * options.documents:
        parser.error("--judges are documents of two kinds: at most twice --documents")
    if min(options.first, options.second) < 2 or options.tokens < options.first:
        parser.error("--first and --second must be at least 2, --tokens at least --first")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if asked to; the report."""
    return run(arguments, parse, measure, render)


if __name__ == "__main__":
    main()
