"""Tables and plots of bench_modes.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import Spread, machine_line, markdown_table
from plots import line, new_figure, save
from traces import Timing

Runs = list[dict[str, Any]]
PLAIN = {"mode": "rw", "wait_budget": 0, "commit": "owner", "chunk": None}
TITLES = {
    "traces": "Traces, against the uniform one",
    "modes": "Modes, against rw on the same trace",
    "commit": "Kinds of commit, against owner on the same trace",
    "wait": "Wait budgets on the phase-skew trace, against none",
}
PAIR = ("uniform", "bursty-update")
TRACES = (*PAIR, "all-update", "poisson", "phase-skew", "heterogeneous")


def timing_of(run: dict[str, Any]) -> Timing:
    """The times of a run."""
    return Timing(**run["timing"])


def decode_rates(runs: Runs) -> Spread:
    """Tokens per second in the decode window."""
    return Spread.of([timing_of(run).decode_rate for run in runs])


def whole_rates(runs: Runs) -> Spread:
    """Tokens per second from the first arrival to the last token."""
    return Spread.of([timing_of(run).rate for run in runs])


def select(report: dict[str, Any], trace: str, **setup: Any) -> Runs:
    """The runs of one trace on one engine; a setup names only what is not plain."""
    engine = {**PLAIN, **setup}
    return [r for r in report["runs"] if r["trace"] == trace and r["setup"] == engine]


def rows_of(report: dict[str, Any], part: str) -> Iterator[tuple[str, Runs, Runs]]:
    """(label, runs, what they are compared with) of one part's table, in order."""
    if part == "traces":
        for trace in TRACES:
            chunk = 1 if trace == "all-update" else None
            yield trace, select(report, trace, chunk=chunk), select(report, "uniform")
    elif part == "wait":
        mode = report["wait_mode"]
        skewed = [r for r in report["runs"] if r["trace"] == "phase-skew"]
        budgets = sorted({r["setup"]["wait_budget"] for r in skewed})
        base = select(report, "phase-skew", mode=mode, wait_budget=budgets[0])
        for budget in budgets:
            runs = select(report, "phase-skew", mode=mode, wait_budget=budget)
            yield f"w = {budget}", runs, base
    else:
        field, plain = ("mode", "rw") if part == "modes" else ("commit", "owner")
        for value in dict.fromkeys([plain, *(r["setup"][field] for r in report["runs"])]):
            for trace in PAIR:
                runs = select(report, trace, **{field: value})
                yield f"{value}, {trace}", runs, select(report, trace)


def part_table(report: dict[str, Any], part: str) -> str:
    """One part as Markdown."""
    header = [
        "run",
        "decode tokens/s",
        "share",
        "tokens/s, whole run",
        "share",
        "p95 ready to first, s",
        "p95 completion, s",
        "forwards (simulated)",
        "held",
        "max wait",
        "violations",
        "streams with other tokens",
    ]
    rows = [
        [label, *cells(runs, base)] for label, runs, base in rows_of(report, part) if runs and base
    ]
    return markdown_table(header, rows)


def cells(runs: Runs, base: Runs) -> list[str]:
    """The values of one row; counts are of the last run, waits and differences of the worst."""
    decode, whole, last = decode_rates(runs), whole_rates(runs), runs[-1]
    expected = last["simulated"]["forwards"] if last["simulated"] else "-"
    times = [timing_of(run) for run in runs]
    return [
        shown(decode, ".1f"),
        f"{decode.median / decode_rates(base).median:.3f}",
        shown(whole, ".1f"),
        f"{whole.median / whole_rates(base).median:.3f}",
        shown(Spread.of([t.first_p95 for t in times]), ".2f"),
        shown(Spread.of([t.completion_p95 for t in times]), ".2f"),
        f"{last['planner']['forwards']} ({expected})",
        str(last["planner"]["held"]),
        str(max(run["planner"]["max_wait"] for run in runs)),
        str(sum(violation(run) for run in runs)),
        str(max(run["differing"] for run in runs)),
    ]


def shown(spread: Spread, form: str) -> str:
    """The median, with the range where there is one."""
    return f"{spread.median:{form}}" if spread.low == spread.high else spread.text(form)


def violation(run: dict[str, Any]) -> bool:
    """Whether somebody waited longer than the budget."""
    return bool(run["planner"]["max_wait"] > run["setup"]["wait_budget"])


def costs_line(costs: dict[str, Any]) -> str:
    """The fitted costs as one paragraph."""
    found = ", ".join(f"{name} {value * 1e3:.2f}" for name, value in costs["costs"].items())
    return (
        f"Costs for the simulation, ms: {found}; from {costs['samples']} runs, each decode window "
        f"met within {costs['error']:.1%}."
    )


def render(report: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    size = report["size"]
    parts = [
        f"{machine_line(report['machine'])}\n\n`{report['command']}`",
        f"{size['streams']} streams, {size['prompt']}-token prompts and more by phase, "
        f"{size['decode']} tokens generated each, chunks of {size['chunk']}, {report['dtype']}, "
        f"seed {report['seed']}; median (smallest..largest).",
    ]
    for part in report["parts"]:
        if part in TITLES:
            mode = f" (mode {report['wait_mode']})" if part == "wait" else ""
            parts.append(f"**{TITLES[part]}{mode}**\n\n{part_table(report, part)}")
    if "costs" in report:
        parts.append(costs_line(report["costs"]))
    return "\n\n".join(parts)


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """One PNG per measured part: `modes-PART.png`."""
    drawn = []
    for part in report["parts"]:
        if part not in TITLES:
            continue
        rows = [row for row in rows_of(report, part) if row[1] and row[2]]
        figure = new_figure(TITLES[part], width=9.0)
        (_plot_wait if part == "wait" else _plot_shares)(figure, rows)
        drawn.append(save(figure, folder / f"modes-{part}.png"))
    return drawn


def _plot_shares(figure: Any, rows: Sequence[tuple[str, Runs, Runs]]) -> None:
    """Decode throughput as a share of what it is compared with."""
    axes = figure.subplots()
    shares = [decode_rates(runs).median / decode_rates(base).median for _, runs, base in rows]
    axes.bar([label.replace(", ", "\n") for label, _, _ in rows], shares)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_ylabel("decode tokens/s, share")


def _plot_wait(figure: Any, rows: Sequence[tuple[str, Runs, Runs]]) -> None:
    """Throughput and latencies by wait budget."""
    budgets = [runs[0]["setup"]["wait_budget"] for _, runs, _ in rows]
    panels = {
        "tokens/s, whole run": [whole_rates(runs) for _, runs, _ in rows],
        "p95 ready to first, s": [
            Spread.of([timing_of(run).first_p95 for run in runs]) for _, runs, _ in rows
        ],
        "p95 completion, s": [
            Spread.of([timing_of(run).completion_p95 for run in runs]) for _, runs, _ in rows
        ],
    }
    for axes, (title, spreads) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        line(axes, budgets, spreads)
        axes.set_title(title)
        axes.set_xlabel("wait budget, decode steps")
        axes.set_ylim(bottom=0)
