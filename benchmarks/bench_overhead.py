"""One stream: ours against an eager loop of transformers and against stock SGLang, in turns.

ours    the batching engine, --ttt-mode rw, with one stream
eager   a loop of transformers with the same fast-weight rule, a KV cache, token by token
stock   SGLang without TTT on the checkpoint without TTT, with the same attention backend

All three processes are alive during the whole run, and whoever's turn it is not is stopped, so that
one runs at a time. In each round everybody answers the same prompt once; the order is reversed
from round to round, so that a steady drift of the machine cancels. A difference is taken within a
round, as a share of the other's time. Engines flush their caches before each run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from bench_modes import QUICK_STATE_MB, STATE_MB, Setup, engine_options, state_options
from bench_serving import KV_SLACK, base_checkpoint, make_prompts
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
)
from live_worker import LiveWorker
from plots import new_figure, save

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.srt_ext.attention import CPU_ATTENTION
from sgl_rwttt.srt_ext.launch import engine_defaults

WORKER = Path(__file__).resolve().with_name("overhead_worker.py")
OURS, OTHERS = "ours", ("eager", "stock")
KINDS = (OURS, *OTHERS)
FULL = {"prompt": 512, "decode": 64, "rounds": 12}
QUICK = {"prompt": 16, "decode": 9, "rounds": 2}
WAIT_S = 1800.0  # for one answer
PHASES = {"decode": "decode step", "median_step": "median decode step", "prefill": "prefill"}
MILLISECONDS = 1e3
ENOUGH = 2  # rounds that a standard error needs


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """All rounds; the report that `render` prints and `--out` stores."""
    facts = machine(options.threads)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as alive:
        if options.model == "embedded":
            model, base = ensure(), options.base or ensure(ttt=False)
        else:
            model = Path(options.model)
            base = options.base or base_checkpoint(model, Path(folder))
        options.attention_backend = (
            options.attention_backend or engine_defaults(model)["attention_backend"]
        )
        (prompt,) = make_prompts(model, 1, options.prompt)
        workers = {}
        for kind in KINDS:
            print(f"starting {kind} ...", file=sys.stderr, flush=True)
            job = job_for(options, kind, model, base, prompt)
            workers[kind] = alive.enter_context(
                LiveWorker(WORKER, job, environment(options, kind), WAIT_S)
            )
        rounds = []
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds} ...", file=sys.stderr, flush=True)
            order = KINDS if number % 2 == 0 else KINDS[::-1]
            question = {"prompt": prompt, "decode": options.decode}
            rounds.append({kind: workers[kind].ask(question) for kind in order})
    return {
        "benchmark": "overhead",
        "machine": facts,
        "command": command_line(__file__, arguments, options.threads),
        **{name: getattr(options, name) for name in FULL},
        "dtype": options.dtype,
        "attention_backend": options.attention_backend,
        "rounds": rounds,
    }


def job_for(
    options: argparse.Namespace, kind: str, model: Path, base: Path, prompt: list[int]
) -> dict[str, Any]:
    """What one of the three is asked to be."""
    folder = base if kind == "stock" else model
    job = {"eager": kind == "eager", "model": str(folder), "dtype": options.dtype, "prompt": prompt}
    if kind == "eager":
        return job
    engine = engine_options(
        folder,
        options.dtype,
        1,
        options.prompt + options.decode + KV_SLACK,
        attention_backend=options.attention_backend,
        disable_overlap_schedule=True,
    )
    memory = QUICK_STATE_MB if options.quick else STATE_MB
    state = state_options(Setup(), memory) if kind == OURS else {}
    return {**job, "options": engine, "state": state, "ttt": kind == OURS}


def environment(options: argparse.Namespace, kind: str) -> dict[str, str]:
    """Threads; stock does without this package's plugin unless it needs its attention backend."""
    variables = {"OMP_NUM_THREADS": str(options.threads)}
    is_without = kind == "stock" and options.attention_backend != CPU_ATTENTION
    return variables | ({"SGLANG_PLUGINS": "none"} if is_without else {})


def seconds(report: dict[str, Any], kind: str, phase: str) -> list[float]:
    """What one kind took in each round."""
    return [round_[kind][phase] for round_ in report["rounds"]]


def differences(report: dict[str, Any], other: str, phase: str) -> list[float]:
    """In each round, what ours took more, as a share of the other's time."""
    pairs = zip(seconds(report, OURS, phase), seconds(report, other, phase), strict=True)
    return [mine / theirs - 1 for mine, theirs in pairs]


def mean_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error; nan of fewer than two."""
    enough = len(values) >= ENOUGH
    return fmean(values), stdev(values) / sqrt(len(values)) if enough else float("nan")


def render(report: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    return "\n\n".join(
        [
            f"{machine_line(report['machine'])}\n\n`{report['command']}`",
            f"One stream, {report['prompt']}-token prompt, {report['decode']} tokens generated, "
            f"{report['dtype']}, attention backend {report['attention_backend']} of both engines; "
            f"{len(report['rounds'])} rounds.",
            time_table(report),
            difference_table(report),
            f"Rounds in which ours and the eager loop said the same: {same_tokens(report)} of "
            f"{len(report['rounds'])}.",
        ]
    )


def time_table(report: dict[str, Any]) -> str:
    """Milliseconds of each kind, and rates."""
    header = [f"median (smallest..largest), {report['dtype']}"]
    header += [*(f"{title}, ms" for title in PHASES.values()), "decode tokens/s"]
    rows = []
    for kind in KINDS:
        spreads = [
            Spread.of([MILLISECONDS * s for s in seconds(report, kind, phase)]) for phase in PHASES
        ]
        rates = Spread.of([1 / s for s in seconds(report, kind, "decode")])
        rows.append([kind, *(spread.text() for spread in spreads), rates.text()])
    return markdown_table(header, rows)


def difference_table(report: dict[str, Any]) -> str:
    """Paired differences and their standard errors; the ratio of the times beside them."""
    header = ["ours against", "of", "mean difference +- standard error", "smallest..largest"]
    header += ["ratio of the medians"]
    rows = []
    for other in OTHERS:
        for phase, title in PHASES.items():
            found = differences(report, other, phase)
            mean, error = mean_error(found)
            own, theirs = (Spread.of(seconds(report, kind, phase)).median for kind in (OURS, other))
            rows.append(
                [
                    other,
                    title,
                    f"{mean:+.1%} +- {error:.1%}",
                    f"{min(found):+.1%}..{max(found):+.1%}",
                    f"{own / theirs:.3f}",
                ]
            )
    return markdown_table(header, rows)


def same_tokens(report: dict[str, Any]) -> int:
    """Rounds in which the two that follow the rule generated the same."""
    return sum(r[OURS]["output"] == r["eager"]["output"] for r in report["rounds"])


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """`overhead-differences.png`: each round's differences, with mean and standard error."""
    figure = new_figure("What ours takes more with one stream", width=8.0)
    for axes, (phase, title) in zip(figure.subplots(1, len(PHASES)), PHASES.items(), strict=True):
        for place, other in enumerate(OTHERS):
            found = [100 * d for d in differences(report, other, phase)]
            mean, error = mean_error(found)
            axes.plot([place] * len(found), found, "o", alpha=0.3)
            axes.errorbar([place], [mean], [[error], [error]], color="black", marker="_", capsize=6)
        axes.axhline(0, color="black", linewidth=0.5)
        axes.set_xticks(range(len(OTHERS)), [f"than {other}" for other in OTHERS])
        axes.set_xlim(-0.5, len(OTHERS) - 0.5)
        axes.set_title(title)
        axes.set_ylabel("%")
    return [save(figure, folder / "overhead-differences.png")]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with every default filled in; SystemExit for wrong usage."""
    parser = new_parser(__doc__)
    sizes = {
        "prompt": "tokens of the prompt",
        "decode": "tokens generated, the prefill's one included; at least 2",
        "rounds": "how often each of the three runs",
    }
    add_sizes(parser, sizes, FULL, QUICK)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--model", default="embedded", help="`embedded` or a checkpoint folder")
    parser.add_argument("--base", type=Path, help="folder of the same checkpoint without TTT")
    parser.add_argument("--attention-backend", help="of both engines (default: ours here)")
    options = parse_sizes(parser, arguments, FULL, QUICK)
    if min(options.prompt, options.rounds, options.threads) < 1 or options.decode < 2:
        parser.error("--prompt, --rounds and --threads must be at least 1, --decode at least 2")
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if asked to."""
    return run(arguments, parse, measure, render)


if __name__ == "__main__":
    main()
