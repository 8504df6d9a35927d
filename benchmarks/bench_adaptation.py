"""Is adapting useful? The loss of a document's second half after its first half, context dropped.

Per document: the loss of the second half in an empty context, then the first half is written into
the state and the context is dropped, then the same loss again. The kinds of documents are those of
documents.py. Each setting is an engine in a process of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import (
    command_line,
    machine,
    machine_line,
    markdown_table,
    parse_sizes,
    run,
    run_worker,
)
from documents import documents
from plots import new_figure, save

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.models.held_out import Change

WORKER = Path(__file__).resolve().with_name("adaptation_worker.py")
TIMEOUT_S = 4 * 3600.0
KINDS = ("code", "pages")
FULL = {"documents": 20, "first": 384, "second": 192}
QUICK = {"documents": 2, "first": 70, "second": 20}


@dataclass(frozen=True)
class Setting:
    """A rule with its parameters."""

    ttt: bool  # the embedded checkpoint with its own rule, or without one
    options: dict[str, Any]


SETTINGS = {
    "in_place": Setting(True, {}),
    "lora_delta, defaults": Setting(False, {"ttt_backend": "lora_delta"}),
    "lora_delta, lr 1e-3, tau 0": Setting(
        False, {"ttt_backend": "lora_delta", "ttt_lr": 1e-3, "ttt_tau": 0.0}
    ),
}


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """All settings and kinds; the report that `render` prints."""
    from tokenizers import Tokenizer

    facts = machine(options.threads)
    tokenizer = Tokenizer.from_file(str(ensure() / "tokenizer.json"))
    length = options.first + options.second
    given = {k: documents(k, tokenizer, options.documents, length) for k in options.kinds}
    results = {}
    for name in options.settings:
        print(f"running {name} ...", file=sys.stderr, flush=True)
        setting = SETTINGS[name]
        job = {
            "model": str(ensure(ttt=setting.ttt)),
            "options": {"max_total_tokens": 8192, "ttt_memory_mb": 512, **setting.options},
            "first": options.first,
            "documents": given,
        }
        env = {"OMP_NUM_THREADS": str(options.threads)}
        results[name] = run_worker(WORKER, job, env, TIMEOUT_S)
    return {
        "benchmark": "adaptation",
        "machine": facts,
        "command": command_line(__file__, arguments, options.threads),
        "size": {name: getattr(options, name) for name in FULL},
        "settings": {name: asdict(SETTINGS[name]) for name in results},
        "results": results,
    }


def render(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    size, rows = report["size"], []
    for name, result in report["results"].items():
        for kind, runs in result.items():
            change = Change.of([(run["before"], run["after"]) for run in runs])
            better = sum(run["after"] < run["before"] for run in runs)
            rows.append(
                [
                    name,
                    kind,
                    f"{change.before:.3f} -> {change.after:.3f}",
                    f"{change.mean:+.4f} +- {change.error:.4f}",
                    f"{100 * change.mean / change.before:+.1f} %",
                    f"{better} of {change.n}",
                    f"{sum(run['updates'] for run in runs) / change.n:.1f}",
                    f"{sum(run['seconds'] for run in runs) / change.n:.1f}",
                ]
            )
    header = ["rule", "documents", "loss, nats per token", "change +- standard error", "share"]
    header += ["lower in", "updates each", "s to adapt"]
    return "\n\n".join(
        [
            f"{machine_line(report['machine'])}\n\n`{report['command']}`",
            f"{size['documents']} documents per kind, {size['first']} tokens read, loss of the "
            f"{size['second']} after them in an empty context",
            markdown_table(header, rows),
        ]
    )


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """Every document's change of loss, with mean and standard error: `adaptation-changes.png`."""
    results = report["results"]
    figure = new_figure("Change of a document's second half, nats per token", width=9.0)
    every = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
    for axes, (name, result) in zip(every, results.items(), strict=True):
        for place, runs in enumerate(result.values()):
            change = Change.of([(run["before"], run["after"]) for run in runs])
            axes.plot([place] * len(runs), [r["after"] - r["before"] for r in runs], "o", alpha=0.3)
            axes.errorbar([place], [change.mean], [change.error], color="black", capsize=6)
        axes.axhline(0.0, color="black", linewidth=0.5)
        axes.set_xticks(range(len(result)), list(result))
        axes.set_xlim(-0.5, len(result) - 0.5)
        axes.set_title(name)
    return [save(figure, folder / "adaptation-changes.png")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; SystemExit for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in FULL.items():
        parser.add_argument(f"--{name}", type=int, help=f"default {default}")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parse_sizes(parser, arguments, FULL, QUICK)
    if options.documents < 2 or min(options.first, options.second, options.threads) < 1:
        parser.error("--documents must be at least 2; --first, --second and --threads at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if asked to."""
    return run(arguments, parse, measure, render)


if __name__ == "__main__":
    main()
