"""The report of bench_embedded.py: Markdown, plots, and where a stream is safe."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import machine_line, markdown_table
from plots import new_figure, save

from sgl_rwttt.models.held_out import Change

COLUMNS = {
    "reread": "re-read",
    "continuation": "continuation",
    "unrelated": "unrelated text after it",
}
LOSSES = {
    "unrelated": "unrelated texts",
    "last": "the context just read",
    "next": "the context to come",
}


def rise(point: dict[str, Any], name: str) -> float:
    """Mean change of a loss since the weights were untouched, nats per token."""
    pairs = point[name] if name == "unrelated" else [point[name]]
    return statistics.fmean(now - before for before, now in pairs)


def is_safe(point: dict[str, Any], tolerance: float) -> bool:
    """Whether unrelated texts are hardly dearer and what was just read is not."""
    loss = statistics.fmean(before for before, _ in point["unrelated"])
    return rise(point, "unrelated") <= tolerance * loss and rise(point, "last") <= 0.0


def safe_points(curve: Sequence[dict[str, Any]], tolerance: float) -> int:
    """How many points there are before the first one that is not safe."""
    unsafe = (i for i, point in enumerate(curve) if not is_safe(point, tolerance))
    return next(unsafe, len(curve))


def render(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    size = report["size"]
    parts = [f"{machine_line(report['machine'])}\n\n`{report['command']}`"]
    if report["quick"]:
        parts.append("Toy size: the numbers mean nothing.")
    if report["table"]:
        parts += [
            f"{size['first']} tokens of each document are read, then the context is dropped; "
            f"continuation: the {size['second']} tokens behind them. Change of the loss, nats per "
            "token, mean +- standard error over documents",
            _table(report),
        ]
    for kind, curve in report["stability"].items():
        parts += [
            f"Stream of {kind} in contexts of {size['first']} tokens; change of the loss against "
            "untouched weights, nats per token",
            _stability(report, curve),
            safe_range(report, curve),
        ]
    return "\n\n".join(parts)


def _table(report: dict[str, Any]) -> str:
    rows = []
    for kind, runs in report["table"].items():
        changes = [Change.of([run[name] for run in runs]) for name in COLUMNS]
        cells = [
            f"{each.mean:+.4f} +- {each.error:.4f} ({100 * each.mean / each.before:+.1f} %)"
            for each in changes
        ]
        rows.append([kind, str(changes[0].n), f"{changes[0].before:.3f}", *cells])
    return markdown_table(["text", "n", "loss before", *COLUMNS.values()], rows)


def _stability(report: dict[str, Any], curve: Sequence[dict[str, Any]]) -> str:
    safe = safe_points(curve, report["tolerance"])
    rows = [
        [
            f"{point['tokens']:,}",
            *(f"{drift:.4f}" for drift in point["drift"]),
            *(f"{rise(point, name):+.4f}" for name in LOSSES),
            "yes" if index < safe else "no",
        ]
        for index, point in enumerate(curve)
    ]
    drifts = [f"abs(dW)/abs(W), layer {layer}" for layer in report["layers"]]
    return markdown_table(["tokens written", *drifts, *LOSSES.values(), "safe"], rows)


def safe_range(report: dict[str, Any], curve: Sequence[dict[str, Any]]) -> str:
    """The safe range in one sentence."""
    safe = safe_points(curve, report["tolerance"])
    rule = (
        f"Safe means: unrelated texts at most {100 * report['tolerance']:g} % dearer, the context "
        "just read not dearer, at every point so far."
    )
    if not safe:
        return f"{rule} No measured point is."
    last = curve[safe - 1]
    found = f"{rule} Safe up to {last['tokens']:,} tokens (largest drift {max(last['drift']):.4f})"
    if safe == len(curve):
        return f"{found}, all that was read."
    bad = curve[safe]
    return f"{found}, not at {bad['tokens']:,} ({max(bad['drift']):.4f})."


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """The changes by kind of text, and each stream's curves with the safe range shaded."""
    drawn = []
    if report["table"]:
        figure = new_figure("change of the loss after reading, nats per token")
        axes = figure.subplots()
        for shift, (name, title) in enumerate(COLUMNS.items()):
            changes = [Change.of([r[name] for r in runs]) for runs in report["table"].values()]
            places = [index + 0.27 * (shift - 1) for index in range(len(changes))]
            means, errors = [c.mean for c in changes], [c.error for c in changes]
            axes.bar(places, means, 0.25, yerr=errors, capsize=3, label=title)
        axes.set_xticks(range(len(report["table"])), list(report["table"]))
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.legend()
        drawn.append(save(figure, folder / "embedded-table.png"))
    for kind, curve in report["stability"].items():
        figure = new_figure(f"one owner reads a stream of {kind}", 9.0)
        _plot_curve(figure, report, curve)
        drawn.append(save(figure, folder / f"embedded-stability-{kind}.png"))
    return drawn


def _plot_curve(figure: Any, report: dict[str, Any], curve: Sequence[dict[str, Any]]) -> None:
    tokens, safe = [p["tokens"] for p in curve], safe_points(curve, report["tolerance"])
    left, right = figure.subplots(1, 2)
    for index, layer in enumerate(report["layers"]):
        left.plot(tokens, [p["drift"][index] for p in curve], marker="o", label=f"layer {layer}")
    left.set_title("|dW| / |W|")
    for name, title in LOSSES.items():
        right.plot(tokens, [rise(p, name) for p in curve], marker="o", label=title)
    right.axhline(0.0, color="black", linewidth=0.8)
    right.set_title("change of the loss, nats per token")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("tokens written")
        if safe:
            axes.axvspan(tokens[0], tokens[safe - 1], color="green", alpha=0.1, label="safe")
        axes.legend()
