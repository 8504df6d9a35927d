"""The table and the plot of bench_table.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Spread, machine_line, markdown_table
from plots import new_figure, save

Runs = list[dict[str, Any]]
LABELS = {
    "serial": "serial TTT",
    "replicas": "serial replicas",
    "eager": "eager loop of transformers",
    "phase": "phase grouping",
    "commit": "+ owner commit",
    "full": "full read/write",
    "bursty": "bursty-update",
    "all-update": "all-update",
    "siblings": "sibling forks",
    "stock": "stock, no TTT",
    "stock siblings": "stock, siblings",
    "stock native": "stock, its own attention",
}
ROWS = tuple(LABELS)
STOCK_OF = {"siblings": "stock siblings", "stock siblings": "stock siblings"}  # others: "stock"
SAME_STREAMS = ("serial", "replicas", "eager", "phase", "commit")  # as full


def rate(runs: Runs) -> Spread:
    """Tokens per second in the decode window."""
    return Spread.of([r["timing"]["decode_tokens"] / r["timing"]["decode_seconds"] for r in runs])


def shown(spread: Spread, form: str) -> str:
    """The median, with the range where there is one."""
    return f"{spread.median:{form}}" if spread.low == spread.high else spread.text(form)


def render(report: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    size = report["size"]
    return "\n\n".join(
        [
            f"{machine_line(report['machine'])}\n\n`{report['command']}`",
            f"{size['streams']} streams, {size['prompt']}-token prompts and more by phase, "
            f"{size['decode']} tokens generated each, chunks of {size['chunk']}, "
            f"{report['dtype']}; attention backend {report['attention_backend']}; overlap "
            f"scheduling of stock {report['stock_overlap']}; median of {report['repeats']} "
            "(smallest..largest).",
            table(report),
            *notes(report),
        ]
    )


def table(report: dict[str, Any]) -> str:
    """One row per way to serve."""
    header = [
        "row",
        "streams",
        "decode tokens/s",
        "over serial",
        "over replicas",
        "over stock",
        "READ owner steps",
        "WRITE owner steps",
        "peak memory, MiB",
        "prefill, s per stream",
    ]
    rows = report["rows"]
    cells = []
    for name in (name for name in ROWS if name in rows):
        runs = rows[name]
        last = runs[-1]
        bases = ("serial", "replicas", STOCK_OF.get(name, "stock"))
        prefill = [r["timing"]["prefill"] / len(r["outputs"]) for r in runs]
        if name == "replicas" and report["replicas"]["used"]:
            prefill = [p * report["replicas"]["used"] for p in prefill]
        cells.append(
            [
                label(report, name),
                str(len(last["outputs"])),
                shown(rate(runs), ".1f"),
                *(over(rows, name, base) for base in bases),
                str(last["planner"]["rows"]) if "planner" in last else "-",
                str(last["state"]["decode_writes"]) if last["state"] else "-",
                f"{max(r['peak_mib'] for r in runs):,.0f}",
                shown(Spread.of(prefill), ".2f"),
            ]
        )
    return markdown_table(header, cells)


def label(report: dict[str, Any], name: str) -> str:
    """A row's title."""
    if name == "replicas":
        return f"{LABELS[name]}, k = {report['replicas']['used']}"
    return LABELS[name]


def over(rows: dict[str, Runs], name: str, base: str) -> str:
    """The ratio of the rates; `-` where there is nothing to compare with."""
    if base not in rows:
        return "-"
    if rows[name] == rows[base]:  # itself, or the one replica that is the serial engine
        return "1.00"
    return shown(rate(rows[name]).over(rate(rows[base])), ".2f")


def notes(report: dict[str, Any]) -> list[str]:
    """What the table's numbers are, and what does not show in it."""
    found = [f"{name} was not measured: {why}." for name, why in report["failed"].items()]
    if "replicas" in report["rows"]:
        found.append(replica_note(report))
    compared = [name for name in SAME_STREAMS if name in report["rows"]]
    if "full" in report["rows"] and compared:
        counts = ", ".join(f"{name} {differing(report, name)}" for name in compared)
        found.append(f"Streams with other tokens than in the full row: {counts}.")
    return found


def replica_note(report: dict[str, Any]) -> str:
    """How many serial engines the memory of the batch would hold."""
    rows, found = report["rows"], report["replicas"]
    ours, one, all_ = (
        max(r["peak_mib"] for r in rows[name]) for name in ("full", "serial", "replicas")
    )
    return (
        f"The full row takes {ours:,.0f} MiB and one serial engine {one:,.0f} MiB, so "
        f"{found['matched']} of them match it in memory; the row has k = {found['used']}, "
        f"{all_:,.0f} MiB together."
    )


def differing(report: dict[str, Any], name: str) -> str:
    """`n of m` streams of a row whose tokens are not those of the full row."""
    rows = report["rows"]
    outputs, reference = rows[name][-1]["outputs"], rows["full"][-1]["outputs"]
    if name == "replicas":
        reference = shared_outputs(reference, report["replicas"]["used"], len(outputs))
    pairs = list(zip(outputs, reference, strict=False))
    return f"{sum(mine != full for mine, full in pairs)} of {len(pairs)}"


def shared_outputs(outputs: Sequence[list[int]], count: int, kept: int) -> list[list[int]]:
    """Outputs in the order of the replicas that their streams fall to, `kept` in all."""
    parts = [list(outputs[part::count]) for part in range(count)]
    each = -(-kept // count)
    return [output for part in parts for output in part[:each]]


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """`table-rates.png`: the decode rate of every row."""
    rows = report["rows"]
    names = [name for name in ROWS if name in rows]
    rates = [rate(rows[name]) for name in names]
    figure = new_figure("Decode throughput, tokens/s", width=8.0)
    axes = figure.subplots()
    errors = [
        [r.median - r.low for r in rates],
        [r.high - r.median for r in rates],
    ]
    colours = ["tab:gray" if "stock" in name else "tab:blue" for name in names]
    labels = [label(report, name) for name in names]
    bars = axes.barh(labels, [r.median for r in rates], xerr=errors, color=colours, capsize=3)
    if "serial" in rows:
        ratios = [f"{r.median / rate(rows['serial']).median:.2f}x" for r in rates]
        axes.bar_label(bars, ratios, padding=6)
        axes.set_xlabel("tokens/s; labels: over serial")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    return [save(figure, folder / "table-rates.png")]
