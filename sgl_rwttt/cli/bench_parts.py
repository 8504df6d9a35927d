"""The parts of ``sgl-rwttt bench``: which scripts of the benchmarks' folder each one runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import sgl_rwttt

from .errors import CommandFailed, UsageError

QUICK_MINUTES = 1.0  # of a script at toy size


@dataclass(frozen=True)
class Script:
    """One run of `benchmarks/NAME.py`, which gets `--out NAME.json` and these flags."""

    name: str
    minutes: float  # estimated, at full size on two CPU cores
    flags: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)  # instead of `flags`, for a toy size

    def arguments(self, quick: bool) -> list[str]:
        """What follows the script's name on its command line."""
        return ["--out", f"{self.name}.json", *(self.quick if quick else self.flags)]

    def estimate(self, quick: bool) -> float:
        """Minutes."""
        return min(self.minutes, QUICK_MINUTES) if quick else self.minutes


@dataclass(frozen=True)
class Part:
    """Scripts that answer one question, run in this order."""

    name: str
    shows: str
    scripts: tuple[Script, ...]

    @property
    def minutes(self) -> float:
        """The scripts' estimates together."""
        return sum(script.minutes for script in self.scripts)


_MODES_QUICK = ("--quick", "--only", "traces", "costs")
_COSTS = ("--costs", "bench_modes.json")  # the simulation takes the costs that were just measured

PARTS = (
    Part(
        "serving",
        "serial, replicas, phases, commits, WRITE traces, stock, sibling forks",
        (Script("bench_table", 40, ("--budget", "full")), Script("bench_serving", 25)),
    ),
    Part(
        "scaling",
        "streams, prompt lengths, memory, data parallel",
        (Script("bench_scaling", 40, ("--dp", "1", "2")),),
    ),
    Part("overhead", "batch 1 against an eager loop and stock", (Script("bench_overhead", 6),)),
    Part(
        "scheduler",
        "wait budgets, arrivals, skewed and uneven streams; the planner alone; the simulation",
        (
            Script("bench_modes", 15, ("--only", "traces", "wait", "costs"), _MODES_QUICK),
            Script("simulation", 0.1, _COSTS, _COSTS),
            Script("bench_planner", 1, (), ("--steps", "20")),
        ),
    ),
    Part(
        "fidelity", "batched against serial: loss, drift, tokens", (Script("check_fidelity", 20),)
    ),
    Part("ruler", "RULER tasks, serial against batched", (Script("bench_ruler", 180),)),
    Part(
        "adaptation",
        "loss after reading, by rule; the embedded model; stability",
        (Script("bench_adaptation", 10), Script("bench_embedded", 15)),
    ),
    Part(
        "kernels",
        "one READ of one layer; attention on the CPU",
        (Script("bench_kernels", 2, (), ("--repeats", "3")), Script("bench_attention", 10)),
    ),
    Part(
        "control",
        "commit, rollback, fork and memory without a server",
        (Script("bench_control", 2, (), ("--small", "--repeats", "5")),),
    ),
    Part("lang", "verbs, siblings and the interpreter", (Script("bench_lang", 10),)),
    Part(
        "writes",
        "what a WRITE costs, by rule and group",
        (Script("bench_writes", 5, (), ("--groups", "1", "2", "--repeats", "1")),),
    ),
    Part(
        "adapters",
        "fitted adapters against the PEFT library",
        (Script("check_adapters", 5, (), ("--texts", "glossary", "--steps", "4")),),
    ),
    Part(
        "streaming",
        "one long stream of a TTT-Linear model",
        (Script("bench_streaming", 2, ("--threads", "1")),),
    ),
    Part(
        "headline",
        "the headline ratios, of the parts before where they ran, else at a reduced size",
        (Script("bench_headline", 6, ("--from", ".")),),
    ),
)


def chosen(words: Sequence[str], parts: Sequence[Part]) -> list[Part]:
    """The parts that these words name, in the table's order; `all` names every one.

    Raises UsageError for an unknown word.
    """
    known = {part.name for part in parts}
    for word in words:
        if word not in known and word != "all":
            raise UsageError(f"there is no part {word!r}: one of all, {', '.join(sorted(known))}")
    return [part for part in parts if part.name in words or "all" in words]


def scripts_folder(package: Path | None = None) -> Path:
    """The benchmarks' folder: in an installed package, or beside it in a checkout.

    Raises CommandFailed when there is none.
    """
    package = package or Path(sgl_rwttt.__file__).resolve().parent
    for folder in (package / "benchmarks", package.parent / "benchmarks"):
        if (folder / "common.py").is_file():
            return folder
    raise CommandFailed(
        f"the benchmarks are neither in {package} nor beside it: install sgl-rwttt from a wheel, "
        "or editable from a checkout (pip install --editable .)"
    )
