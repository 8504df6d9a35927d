"""The thirteen RULER tasks as the harness has them: what each needs. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MARGIN = 256  # context beyond a task's nominal length: fwe does not count its answer in it
ESSAYS = ("PaulGrahamEssays.json", "nltk_data/tokenizers/punkt_tab")
SQUAD = ("dev-v2.0.json",)
HOTPOT = ("hotpot_dev_distractor_v1.json",)


class Refused(ValueError):
    """These tasks cannot be run as asked; the message says which and why. Nothing was run."""


@dataclass(frozen=True)
class Task:
    """One task of the harness."""

    harness: str  # its name there
    files: tuple[str, ...] = ()  # below --ruler-data; none: it makes its text itself
    shortest: int = 512  # shorter: the harness makes no prompt of about the length, or never ends


TASKS = {
    "niah_single_1": Task("niah_single_1"),
    "niah_single_2": Task("niah_single_2", ESSAYS, 2048),
    "niah_single_3": Task("niah_single_3", ESSAYS, 2048),
    "niah_multikey_1": Task("niah_multikey_1", ESSAYS, 2048),
    "niah_multikey_2": Task("niah_multikey_2"),
    "niah_multikey_3": Task("niah_multikey_3"),
    "niah_multivalue": Task("niah_multivalue", ESSAYS, 2048),
    "niah_multiquery": Task("niah_multiquery", ESSAYS, 2048),
    "vt": Task("ruler_vt", shortest=1024),
    "cwe": Task("ruler_cwe", shortest=1024),
    "fwe": Task("ruler_fwe"),
    "qa_squad": Task("ruler_qa_squad", SQUAD, 2048),
    "qa_hotpot": Task("ruler_qa_hotpot", HOTPOT, 2048),
}


def missing_files(data: Path | None) -> dict[str, list[str]]:
    """The files that each task lacks below `data`; tasks that lack none are left out."""
    lacking = {
        name: [file for file in task.files if data is None or not (data / file).exists()]
        for name, task in TASKS.items()
    }
    return {name: files for name, files in lacking.items() if files}


def check_lengths(tasks: Iterable[str], lengths: Iterable[int], context: int, whose: str) -> None:
    """Raise Refused when a task cannot have one of the lengths in `context` tokens."""
    reasons = []
    named = list(tasks)
    for length in lengths:
        if length + MARGIN > context:
            reasons.append(
                f"{', '.join(named)} at {length}: {length} + {MARGIN} tokens are more than the "
                f"{context} of {whose}"
            )
        short = [name for name in named if length < TASKS[name].shortest]
        if short:
            needs = ", ".join(f"{name} at {TASKS[name].shortest} or more" for name in short)
            reasons.append(f"{', '.join(short)} at {length}: too short, use {needs}")
    if reasons:
        raise Refused("; ".join(reasons))


def expected_writes(prompt: int, generated: int, cached: int, chunk: int) -> int:
    """Blocks that a request completes; its last token is not read, its cached ones were before."""
    return (prompt + generated - 1) // chunk - cached // chunk
