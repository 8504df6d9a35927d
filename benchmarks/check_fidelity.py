"""Does a batch give each owner what it would get alone? Exit status 1 when a gate fails.

Parts (`--only`):
  configurations  three chunk lengths, three prompt lengths: owners alone, then in one batch
  golden          the published In-Place TTT code's vectors, owners at other places in a batch
  broken          the product with one rule broken at a time: every gate has to see it

The same tokens are forced in both runs (teacher forcing): a part of them is read in the prefill,
the others are decoded one by one. Each engine runs in a process of its own. The rules are broken
from outside, in the scheduler's process (fidelity_hooks.py). `--break RULE` runs the part `broken`
alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench_serving import TIMEOUT_S, make_prompts
from common import (
    add_sizes,
    command_line,
    machine,
    new_parser,
    parse_sizes,
    run,
    run_worker,
)
from fidelity_gates import BROKEN_CHUNK, DTYPES, TOP, failures
from fidelity_golden import golden_cases, golden_difference, golden_job
from fidelity_hooks import RULES
from fidelity_report import plot, render
from fidelity_worker import FidelityJob

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.srt_ext.launch import engine_defaults

__all__ = ["main", "plot", "render"]

WORKER = Path(__file__).resolve().with_name("fidelity_worker.py")
PARTS = ("configurations", "golden", "broken")
FULL: dict[str, Any] = {
    "chunks": [16, 32, 64],
    "bf16_chunks": [32],
    "prompts": [64, 140, 250],
    "owners": 8,
    "read": 256,
    "decode": 256,
}
QUICK: dict[str, Any] = {
    "chunks": [16],
    "bf16_chunks": [],
    "prompts": [20, 40],
    "owners": 3,
    "read": 24,
    "decode": 12,
}
BROKEN = {"read": 448, "decode": 40}  # as many as let chunks of 32 fold into a dense base
QUICK_RULES = ("stale-version", "rate")


def configurations(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(dtype, chunk) of each engine."""
    chunks = {"float32": options.chunks, "bfloat16": options.bf16_chunks}
    for dtype in DTYPES:
        for chunk in chunks[dtype]:
            yield dtype, chunk


def job_for(
    options: argparse.Namespace,
    dtype: str,
    chunk: int,
    size: dict[str, int],
    rules: Sequence[str | None],
) -> FidelityJob:
    """Owners of the embedded model: those with the asked prompts, and company."""
    model, scored = ensure(), size["read"] + size["decode"]
    prompts = [options.prompts[n % len(options.prompts)] for n in range(options.owners)]
    windows = make_prompts(model, options.owners, max(prompts) + scored)
    engine = engine_defaults(
        model,
        dtype=dtype,
        skip_tokenizer_init=True,
        max_total_tokens=max(4096, options.owners * (max(prompts) + scored + 64)),
        max_running_requests=options.owners,
        json_model_override_args=json.dumps({"ttt_chunk": chunk}),
    )
    return FidelityJob(
        model=str(engine.pop("model_path")),
        options=engine,
        state={"ttt_memory_mb": 64 * options.owners},
        tokens=[ids[: n + scored] for ids, n in zip(windows, prompts, strict=True)],
        prompts=prompts,
        read=[size["read"]] * options.owners,
        compared=len(options.prompts),
        top=TOP,
        rules=list(rules),
    )


def run_job(options: argparse.Namespace, what: str, job: FidelityJob) -> dict[str, Any]:
    """The result of one engine."""
    print(f"running {what} ...", file=sys.stderr, flush=True)
    return run_worker(WORKER, asdict(job), {"OMP_NUM_THREADS": str(options.threads)}, TIMEOUT_S)


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """All parts; the report that `render` prints."""
    size = {name: getattr(options, name) for name in ("read", "decode")}
    report: dict[str, Any] = {
        "benchmark": "fidelity",
        "machine": machine(options.threads),
        "command": command_line(__file__, arguments, options.threads),
        "quick": options.quick,
        "size": {**size, "owners": options.owners, "prompts": options.prompts},
        "rules": options.rules if "broken" in options.only else [],
        "configurations": [],
        "golden": [],
        "broken": [],
    }
    report["golden"] = golden_results(options, report["rules"])
    if "configurations" in options.only:
        for dtype, chunk in configurations(options):
            job = job_for(options, dtype, chunk, size, [None])
            result = run_job(options, f"chunks of {chunk}, {dtype}", job)
            report["configurations"].append({"dtype": dtype, "chunk": chunk, **result})
    if report["rules"]:
        report["broken_size"] = size if options.quick else BROKEN
        rules = [None, *report["rules"]]
        job = job_for(options, "float32", BROKEN_CHUNK, report["broken_size"], rules)
        report["broken"] = run_job(options, "broken rules", job)
    return report


def golden_results(options: argparse.Namespace, rules: Sequence[str]) -> list[dict[str, Any]]:
    """Largest difference of each case, by the rule that was broken ("" for none).

    The rules are broken in the first case. Without the part `golden` there is no other.
    """
    cases = golden_cases()
    if "golden" not in options.only:
        cases = cases[:1] if rules else []
    results = []
    for folder in cases[:1] if options.quick else cases:
        broken = [] if results else rules
        job = golden_job(folder, [None, *broken])
        batches = run_job(options, f"golden vectors, {folder.name}", job)["batches"]
        found = {each["rule"] or "": golden_difference(folder, each["owners"]) for each in batches}
        results.append({"name": folder.name, "difference": found})
    return results


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with every default filled in; SystemExit for wrong usage."""
    parser = new_parser(__doc__)
    lists = {"chunks": "chunk lengths in float32"}
    lists["prompts"] = "tokens before those that are scored, one compared owner each"
    add_sizes(parser, lists, FULL, QUICK, nargs="+")
    slow = {"bf16_chunks": "chunk lengths in bfloat16, slow on a CPU that lacks its arithmetic"}
    add_sizes(parser, slow, FULL, QUICK, nargs="*")
    sizes = {
        "owners": "owners in the batch; those beyond the prompts are company",
        "read": "scored tokens that are read in the prefill",
        "decode": "scored tokens that are decoded",
    }
    add_sizes(parser, sizes, FULL, QUICK)
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART")
    parser.add_argument(
        "--break",
        dest="rules",
        nargs="+",
        choices=("all", *RULES),
        metavar="RULE",
        help=f"all (default), or of {', '.join(RULES)}",
    )
    options = parse_sizes(parser, arguments, FULL, QUICK)
    options.only = options.only or (["broken"] if options.rules else list(PARTS))
    asked = options.rules or (QUICK_RULES if options.quick else ["all"])
    options.rules = list(RULES if "all" in asked else asked)
    lengths = (*options.chunks, *options.bf16_chunks, *options.prompts)
    if min(*lengths, options.read, options.threads) < 1 or options.decode < 2:
        parser.error("lengths must be at least 1, --decode at least 2")
    if options.owners < max(2, len(options.prompts)):
        parser.error("--owners must be at least 2, and one for each prompt")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if asked to; the report."""
    return run(arguments, parse, measure, render)


if __name__ == "__main__":
    sys.exit(1 if failures(main()) else 0)
