"""What a WRITE costs: owners that complete a chunk in one decode step, beside a step without.

In-Place TTT and LoRA deltas on the embedded model, TTT-Linear on the tests' checkpoint; through the
real engine, each in a process of its own. The cost of a WRITE is the step's time less that of the
steps around it; per owner it is that over the group.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_adaptation import SETTINGS
from bench_streaming import MODEL as LINEAR
from common import (
    Spread,
    add_run_flags,
    command_line,
    machine,
    machine_line,
    markdown_table,
    run,
    run_worker,
)
from plots import line, new_figure, save

from sgl_rwttt.models.embedded import ensure

WORKER = Path(__file__).resolve().with_name("writes_worker.py")
TIMEOUT_S = 3600.0
RULES = ("in_place", "lora_delta, lr 1e-3, tau 0")  # with tau 0 every segment is learnt
STREAMING = "streaming, tests' checkpoint"


def engines(linear: Path | None) -> dict[str, tuple[str, dict[str, Any]]]:
    """Rule -> (checkpoint folder, engine options)."""
    room = {"max_total_tokens": 8192, "ttt_memory_mb": 512}
    found = {
        name: (str(ensure(ttt=SETTINGS[name].ttt)), {**room, **SETTINGS[name].options})
        for name in RULES
    }
    if linear is not None:
        found[STREAMING] = (str(linear), {"max_total_tokens": 8192, "ttt_memory_mb": 16})
    return found


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Every rule; the report that `render` prints."""
    facts, results = machine(options.threads), {}
    for name, (model, settings) in engines(options.linear).items():
        print(f"running {name} ...", file=sys.stderr, flush=True)
        job = {
            "model": model,
            "options": settings,
            "groups": options.groups,
            "repeats": options.repeats,
        }
        env = {"OMP_NUM_THREADS": str(options.threads)}
        results[name] = run_worker(WORKER, job, env, TIMEOUT_S)
    return {
        "benchmark": "writes",
        "machine": facts,
        "command": command_line(__file__, arguments, options.threads),
        "size": {"groups": options.groups, "repeats": options.repeats},
        "results": results,
    }


def per_owner(runs: Sequence[dict[str, float]], owners: int) -> Spread:
    """Milliseconds of a WRITE, per owner of the group."""
    return Spread.of([1e3 * (run["write"] - run["plain"]) / owners for run in runs])


def render(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    rows, memory = [], []
    for name, result in report["results"].items():
        pools = result["pools"]
        for group, runs in result["groups"].items():
            plain = Spread.of([1e3 * run["plain"] for run in runs])
            each = per_owner(runs, int(group))
            rows.append([name, str(pools["chunk"]), group, plain.text(), each.text()])
        kib = [f"{pools[key] / 1024:.1f}" for key in ("page_bytes", "base_bytes")]
        memory.append([name, str(pools["chunk"]), *kib, str(pools["fold_pages"] or "never")])
    repeats = report["size"]["repeats"]
    return "\n\n".join(
        [
            f"{machine_line(report['machine'])}\n\n`{report['command']}`",
            f"Median of {repeats} runs (smallest..largest)",
            markdown_table(
                ["rule", "chunk", "owners", "step without a WRITE, ms", "WRITE, ms per owner"], rows
            ),
            markdown_table(
                ["rule", "chunk", "page, KiB", "dense base, KiB", "pages before a base"], memory
            ),
        ]
    )


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """What a WRITE costs per owner against the size of its group: `writes-group.png`."""
    figure = new_figure("A WRITE by the size of its group", width=8.0)
    results = report["results"]
    every = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, result) in zip(every, results.items(), strict=True):
        groups = [int(group) for group in result["groups"]]
        runs = result["groups"].values()
        spreads = [per_owner(each, group) for each, group in zip(runs, groups, strict=True)]
        line(axes, groups, spreads)
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_title(name)
        axes.set_xlabel("owners of the group")
        axes.set_ylabel("WRITE, ms per owner")
    return [save(figure, folder / "writes-group.png")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; SystemExit for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--linear",
        type=Path,
        metavar="DIR",
        default=LINEAR if LINEAR.is_dir() else None,
        help="TTT-Linear checkpoint; default: the tests', where they are",
    )
    add_run_flags(parser)
    options = parser.parse_args(arguments)
    if min(*options.groups, options.repeats, options.threads) < 1:
        parser.error("--groups, --repeats and --threads must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if asked to."""
    return run(arguments, parse, measure, render)


if __name__ == "__main__":
    main()
