"""Tables and plots of bench_scaling.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import Spread, machine_line, markdown_table
from footprint import MIB
from plots import line, new_figure, save
from table_report import rate, shown

Point = dict[str, Any]


def render(report: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    parts = [
        f"{machine_line(report['machine'])}\n\n`{report['command']}`",
        f"{report['decode']} tokens generated per stream, {report['dtype']}, attention backend "
        f"{report['attention_backend']}, {report['memory_mb']} MiB of state memory; median of "
        f"{report['repeats']} (smallest..largest). One stream at a time is the row of one stream.",
        point_table(report),
        frontier_table(report),
    ]
    if "dp" in report:
        parts += [dp_table(report["dp"]), dp_note(report)]
    return "\n\n".join(parts)


def point_table(report: dict[str, Any]) -> str:
    """One row per prompt length and number of streams."""
    header = ["prompt", "streams", "decode tokens/s", "over one stream", "at once"]
    header += ["retracted", "prefill, s", "peak memory, MiB", "point"]
    measured = {column["prompt"]: column for column in report["columns"]}
    rows = []
    for prompt in report["prompts"]:
        points = measured[prompt]["points"] if prompt in measured else []
        known = {point["streams"]: point for point in points}
        for streams in report["streams"]:
            place = [str(prompt), str(streams)]
            point = known.get(streams)
            if point is None:
                rows.append([*place, *["-"] * 6, absent(report, prompt)])
            else:
                rows.append([*place, *cells(point, points[0]), verdict(point)])
    return markdown_table(header, rows)


def cells(point: Point, single: Point) -> list[str]:
    """The values of a measured point; rates only where all its streams ran together."""
    runs = point["runs"]
    if not runs:
        return ["-"] * 6
    rates = ["-", "-"]
    if point["fits"]:
        own = rate(runs)
        rates = [shown(own, ".1f"), f"{own.median / rate(single['runs']).median:.2f}"]
    return [
        *rates,
        str(min(r["at_once"] for r in runs)),
        str(max(r["retracted"] for r in runs)),
        shown(Spread.of([r["timing"]["prefill"] for r in runs]), ".2f"),
        f"{max(r['peak_mib'] for r in runs):,.0f}",
    ]


def verdict(point: Point) -> str:
    """Whether a measured point is feasible."""
    if "refused" in point:
        return "infeasible: refused with StateCapacity"
    if point["fits"]:
        return "feasible"
    what = [
        name
        for name, applies in (
            ("streams wait", any(r["at_once"] < point["streams"] for r in point["runs"])),
            ("streams are retracted", any(r["retracted"] for r in point["runs"])),
        )
        if applies
    ]
    return f"infeasible: {', '.join(what)}"


def absent(report: dict[str, Any], prompt: int) -> str:
    """Why a point was not measured."""
    if prompt + report["decode"] > report["context"]:
        return f"infeasible: the model's context is {report['context']} tokens"
    return "not run: fewer streams are infeasible already"


def private_dense(report: dict[str, Any]) -> int:
    """Owners with a private dense copy of the fast weights that the state memory would hold."""
    return int(report["memory_mb"] * MIB // report["pools"]["base_bytes"])


def frontier_table(report: dict[str, Any]) -> str:
    """How many streams the state memory holds, by prompt length."""
    header = ["prompt", "streams that fit", "one more", "private dense weights, computed"]
    rows = []
    for column in report["columns"]:
        fits, tried = column["fits"], report["streams"][-1]
        is_open = all(point["fits"] for point in column["points"])
        rows.append(
            [
                str(column["prompt"]),
                f"{tried} or more" if is_open else str(fits),
                "not tried" if is_open else failure(column, fits + 1),
                str(private_dense(report)),
            ]
        )
    return markdown_table(header, rows)


def failure(column: dict[str, Any], streams: int) -> str:
    """What happens with one stream more than fit."""
    points = [*column["points"], *column["probes"]]
    return verdict(next(point for point in points if point["streams"] == streams))


def dp_rows(found: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Spread, Spread | None]]:
    """(row, its rate, the rate of one rank with the same streams per rank) where measured."""
    single = {row["load"]: rate(row["runs"]) for row in found["rows"] if _is_single(row)}
    for row in found["rows"]:
        if "refused" not in row:
            yield row, rate(row["runs"]), single.get(row["load"])


def _is_single(row: dict[str, Any]) -> bool:
    return row["ranks"] == 1 and "refused" not in row


def dp_table(found: dict[str, Any]) -> str:
    """One row per data-parallel size and load."""
    header = ["dp", "streams", "decode tokens/s", "over one rank", "efficiency", "launch"]
    rows = []
    for row, own, single in dp_rows(found):
        gain = "-" if single is None else shown(own.over(single), ".2f")
        share = "-" if single is None else f"{own.median / single.median / row['ranks']:.2f}"
        count = row["ranks"] * row["load"]
        rows.append([str(row["ranks"]), str(count), shown(own, ".1f"), gain, share, "served"])
    for row in found["rows"]:
        if "refused" in row:
            said = row["refused"].replace("|", "/")
            rows.append([str(row["ranks"]), "-", "-", "-", "-", f"refused: {said}"])
    return markdown_table(header, rows)


def dp_note(report: dict[str, Any]) -> str:
    """What the data-parallel rows compare."""
    found, cores = report["dp"], report["machine"]["cores"]
    return (
        f"Prompts of {found['prompt']} tokens, every stream in a session of its own, "
        f"threads per rank: {found['threads']}. A row is compared with one rank that has as many "
        f"streams per rank. The machine has {cores} cores, which all ranks and the processes that "
        "tokenize and detokenize share: what ranks on processors of their own gain was not "
        "measured."
    )


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """`scaling-rates.png` and `scaling-memory.png`."""
    return [_plot_rates(report, folder), _plot_memory(report, folder)]


def _plot_rates(report: dict[str, Any], folder: Path) -> Path:
    """Decode rates of the feasible points, a curve per prompt length; one stream as a level."""
    figure = new_figure("Decode throughput of streams that run together")
    axes = figure.subplots()
    for column in report["columns"]:
        points = [point for point in column["points"] if point["fits"]]
        if points:
            rates = [rate(point["runs"]) for point in points]
            xs = [float(point["streams"]) for point in points]
            line(axes, xs, rates, f"{column['prompt']} tokens of prompt")
            axes.axhline(rates[0].median, color="black", linewidth=0.5, linestyle=":")
    axes.set_xscale("log", base=2)
    axes.set_xticks(report["streams"], [str(n) for n in report["streams"]])
    axes.set_xlabel("streams; dotted: one at a time")
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0)
    axes.legend()
    return save(figure, folder / "scaling-rates.png")


def _plot_memory(report: dict[str, Any], folder: Path) -> Path:
    """The frontier, and what private dense weights would hold."""
    figure = new_figure(f"Streams that {report['memory_mb']} MiB of state memory hold")
    axes = figure.subplots()
    columns = report["columns"]
    labels = [str(column["prompt"]) for column in columns]
    bars = axes.bar(labels, [column["fits"] for column in columns])
    is_open = [all(point["fits"] for point in column["points"]) for column in columns]
    axes.bar_label(bars, ["or more" if more else "" for more in is_open])
    level = private_dense(report)
    axes.axhline(level, color="black", linestyle=":", label="private dense weights, computed")
    axes.set_xlabel("tokens of prompt")
    axes.set_ylabel("streams that fit, measured")
    axes.legend()
    return save(figure, folder / "scaling-memory.png")
