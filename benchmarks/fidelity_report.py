"""The report of check_fidelity.py as Markdown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from common import machine_line, markdown_table
from fidelity_gates import (
    BROKEN_CHUNK,
    DTYPES,
    GATES,
    GOLDEN_LIMIT,
    LIMITS,
    broken_numbers,
    failed,
    failures,
    owners_of,
    rejected_by,
)
from fidelity_hooks import RULES
from plots import new_figure, save


def render(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    parts = [f"{machine_line(report['machine'])}\n\n`{report['command']}`"]
    if report["quick"]:
        parts.append("Toy size: the numbers mean nothing.")
    if report["configurations"]:
        parts += [_what(report), _configurations(report), _limits()]
    if report["golden"]:
        parts += [
            "Golden vectors of the published code, float32, four owners in one batch; limit "
            f"{GOLDEN_LIMIT:.0e}",
            markdown_table(
                ["checkpoint", "largest difference of a log-probability"],
                [[case["name"], f"{case['difference']['']:.2e}"] for case in report["golden"]],
            ),
        ]
    if report["rules"]:
        parts += [_broken_title(report), _broken(report)]
    bad = failures(report)
    parts.append("\n".join(f"- FAILED: {each}" for each in bad) or "Every gate is as it has to be.")
    return "\n\n".join(parts)


def _what(report: dict[str, Any]) -> str:
    size = report["size"]
    return (
        f"{size['owners']} owners in one batch against each alone; {size['read'] + size['decode']} "
        f"tokens scored per owner, {size['read']} of them read in the prefill and {size['decode']} "
        "decoded; state counted in full (alpha 1.0)"
    )


def _configurations(report: dict[str, Any]) -> str:
    rows = []
    for engine in report["configurations"]:
        for prompt, n in zip(report["size"]["prompts"], owners_of(engine, 0), strict=True):
            losses = n["loss alone"], n["loss in the batch"]
            rows.append(
                [
                    engine["dtype"],
                    str(engine["chunk"]),
                    str(prompt),
                    *(f"{loss:.5f}" for loss in losses),
                    f"{math.exp(losses[1] - losses[0]) - 1:+.1e}",
                    f"{n['nll']:.1e}",
                    f"{n['kl']:.1e}",
                    f"{n['largest']:.1e}",
                    f"{n['top5']:.4f}",
                    f"{n['drift']:.1e}",
                    ", ".join(failed(n, engine["dtype"])) or "none",
                ]
            )
    header = ["dtype", "C", "prompt", "NLL alone", "NLL in the batch", "PPL ratio - 1"]
    header += ["NLL difference", "KL estimate", "largest r", "top-5 agreement", "relative drift"]
    return markdown_table([*header, "rejected by"], rows)


def _limits() -> str:
    rows = [
        [gate, text, *(f"{'>=' if gate == 'top5' else '<='} {LIMITS[d][gate]:g}" for d in DTYPES)]
        for gate, text in GATES.items()
    ]
    return markdown_table(["gate", "what", *DTYPES], rows)


def _broken_title(report: dict[str, Any]) -> str:
    size = report["broken_size"]
    return (
        f"One rule broken at a time, float32, C = {BROKEN_CHUNK}, {size['read']} tokens read and "
        f"{size['decode']} decoded; the worst of {len(report['size']['prompts'])} owners. Numbers "
        "in bold are rejected"
    )


def _broken(report: dict[str, Any]) -> str:
    rows = []
    for rule, numbers in broken_numbers(report).items():
        cells = [
            f"{numbers[gate]:.4f}" if gate == "top5" else f"{numbers[gate]:.1e}"
            for gate in (*GATES, "golden")
        ]
        seen = rejected_by(numbers)
        marked = [
            f"**{cell}**" if gate in seen else cell
            for gate, cell in zip((*GATES, "golden"), cells, strict=True)
        ]
        rows.append([rule or "none", RULES.get(rule, "nothing: the control"), *marked])
    header = ["rule", "what is broken", "NLL difference", "KL estimate", "top-5 agreement"]
    return markdown_table([*header, "relative drift", "golden"], rows)


def plot(report: dict[str, Any], folder: Path) -> list[Path]:
    """What three gates say of each broken rule and of the control, with their limits."""
    numbers = broken_numbers(report)
    if not numbers:
        return []
    figure = new_figure("one rule broken at a time, float32", 12.0)
    shown = {"kl": "KL estimate", "drift": "relative drift", "golden": "golden vectors"}
    limits = {**LIMITS["float32"], "golden": GOLDEN_LIMIT}
    for axes, (gate, title) in zip(figure.subplots(1, 3, sharey=True), shown.items(), strict=True):
        axes.barh([rule or "none" for rule in numbers], [each[gate] for each in numbers.values()])
        axes.axvline(limits[gate], color="red", label="limit")
        axes.set_xscale("log")
        axes.set_title(title)
        axes.legend()
    return [save(figure, folder / "fidelity-broken.png")]
