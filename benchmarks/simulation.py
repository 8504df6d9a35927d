"""The decode loop in simulated time, with the real planner: traces, modes and wait budgets.

Every round asks `sgl_rwttt.core.BatchPlanner` which streams run; only time is modelled. A forward
pass of r rows costs forward + r * row, a WRITE group of k owners group + k * write, a prefill
forward + tokens * prefill_token, all in seconds. `bench_modes.py --out FILE.json` measures these
costs on the engine. Attention that grows with the context is not in the model.

The last table repeats the wait-budget sweep on the phase-skew trace with five seeds. A violation is
a wait outside [0, wait budget] by the simulation's own count, a READ beside a WRITE or an owner
twice in a group, or a held READ: there must be none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from common import command_line, markdown_table, write_json
from costs import Costs, Counts, seconds
from engine_worker import Stream as Answer
from traces import DEFAULT, TRACES, Size, Timing, Trace, mean, timing

from sgl_rwttt.core import BatchPlanner, Effect, Round, Transition

MODES = ("rw", "phase", "serial")
BUDGETS = (0, 1, 2, 4, 8, 16)
SEEDS = 5


@dataclass(frozen=True)
class Outcome:
    """One simulated run."""

    trace: str
    mode: str
    wait_budget: int
    timing: Timing
    counts: Counts
    rounds: int
    held: int  # stream-rounds
    max_wait: int
    violations: int


@dataclass
class _Live:
    """One stream while it runs."""

    name: str
    position: int  # tokens consumed
    arrivals: list[tuple[float, int]]
    ready: int  # round since which its next transition is ready


class Simulation:
    """One run of a trace; every stream that has arrived is prefilled before the next round."""

    def __init__(
        self,
        trace: Trace,
        costs: Costs,
        mode: str = "rw",
        wait_budget: int = 0,
        target_batch: int | None = None,
    ) -> None:
        self.trace, self.costs, self.mode, self.budget = trace, costs, mode, wait_budget
        self.planner = BatchPlanner(1 if mode == "serial" else target_batch, wait_budget)
        self.counts = Counts()
        self.rounds = self.held = self.max_wait = self.violations = 0
        self.clock = 0.0
        pace = costs.forward + len(trace.streams) * costs.row
        self.at = [stream.at * pace for stream in trace.streams]
        self.live: dict[str, _Live] = {}
        self.answers: dict[int, Answer] = {}

    def run(self) -> Outcome:
        """Until every stream has its tokens."""
        waiting = sorted(range(len(self.at)), key=self.at.__getitem__)
        while waiting or self.live:
            arrived = [i for i in waiting if self.at[i] <= self.clock]
            if arrived:
                self._prefill(arrived)
                waiting = [i for i in waiting if i not in arrived]
            elif self.live:
                self._round()
            else:
                self.clock = self.at[waiting[0]]
        answers = [self.answers[i] for i in range(len(self.at))]
        return Outcome(
            self.trace.name,
            self.mode,
            self.budget,
            timing(self.at, answers),
            self.counts,
            self.rounds,
            self.held,
            self.max_wait,
            self.violations,
        )

    def _prefill(self, arrived: Sequence[int]) -> None:
        tokens = sum(self.trace.streams[i].prompt for i in arrived)
        self.clock += self.costs.forward + tokens * self.costs.prefill_token
        for index in arrived:
            name, prompt = str(index), self.trace.streams[index].prompt
            self.live[name] = _Live(name, prompt, [(self.clock, 1)], self.rounds + 1)
            self._leave_if_done(self.live[name])

    def _round(self) -> None:
        self.rounds += 1
        planned = self.planner.plan([self._next(s) for s in self.live.values()], self._version)
        self._judge(planned)
        self.held += len(planned.held)
        groups = planned.groups
        forwards = [groups] if self.mode == "rw" else [(group,) for group in groups]
        for forward in forwards:
            steps = [step for group in forward for step in group.transitions]
            writing = [len(g.transitions) for g in forward if g.key.effect is Effect.WRITE]
            self._spend(Counts(1, len(steps), len(writing), sum(writing)))
            for step in steps:
                self._advance(self.live[step.owner])

    def _next(self, live: _Live) -> Transition:
        writes = (live.position + 1) % self.trace.chunk == 0
        return Transition(
            live.name,
            "main",
            "in_place",
            (self.trace.chunk,),
            Effect.WRITE if writes else Effect.READ,
            live.position // self.trace.chunk,
        )

    def _version(self, owner: str, branch: str) -> int:
        return self.live[owner].position // self.trace.chunk

    def _spend(self, done: Counts) -> None:
        for field in fields(Counts):
            total = getattr(self.counts, field.name) + getattr(done, field.name)
            setattr(self.counts, field.name, total)
        self.clock += seconds(self.costs, done)

    def _advance(self, live: _Live) -> None:
        live.position += 1
        live.arrivals.append((self.clock, live.arrivals[-1][1] + 1))
        live.ready = self.rounds + 1
        self._leave_if_done(live)

    def _leave_if_done(self, live: _Live) -> None:
        index = int(live.name)
        if live.arrivals[-1][1] >= self.trace.streams[index].decode:
            self.answers[index] = Answer(live.arrivals, [], None)
            del self.live[live.name]

    def _judge(self, planned: Round) -> None:
        """Count broken rules, by the simulation's own count of rounds."""
        self.violations += sum(step.effect is not Effect.WRITE for step in planned.held)
        for group in planned.groups:
            owners = [step.owner for step in group.transitions]
            self.violations += len(owners) - len(set(owners))
            self.violations += len({step.effect for step in group.transitions}) - 1
            for owner in owners:
                wait = self.rounds - self.live[owner].ready
                self.max_wait = max(self.max_wait, wait)
                self.violations += not 0 <= wait <= self.budget


def sweep(size: Size, costs: Costs, mode: str, budgets: Sequence[int]) -> list[list[Outcome]]:
    """The phase-skew trace at every wait budget, with five seeds each."""
    return [
        [
            Simulation(TRACES["phase-skew"](size, seed), costs, mode, budget).run()
            for seed in range(SEEDS)
        ]
        for budget in budgets
    ]


def trace_table(outcomes: Sequence[Outcome], base: Outcome) -> str:
    """One row per run, and its share of the uniform trace in mode rw."""
    rows = []
    for o in outcomes:
        t = o.timing
        share = t.decode_rate / base.timing.decode_rate
        rates = [f"{t.decode_rate:.1f}", f"{share:.3f}", f"{t.rate:.1f}"]
        times = [f"{t.first_p95:.2f}", f"{t.completion_p95:.2f}"]
        counts = [str(o.counts.forwards), str(o.counts.groups), str(o.counts.writes)]
        rows.append([o.trace, o.mode, *rates, *times, *counts, str(o.violations)])
    rates = ["decode tokens/s", "share of uniform", "tokens/s, whole run"]
    times = ["p95 ready to first, s", "p95 completion, s"]
    header = ["trace", "mode", *rates, *times, "forwards", "WRITE groups", "writes", "violations"]
    return markdown_table(header, rows)


def sweep_table(swept: Sequence[Sequence[Outcome]]) -> str:
    """Means over the seeds; the largest wait and the sum of violations of all."""
    rows = []
    for runs in swept:
        values = [
            f"{mean([r.timing.rate for r in runs]):.2f}",
            f"{mean([r.timing.first_p95 for r in runs]):.3f}",
            f"{mean([r.timing.completion_p95 for r in runs]):.2f}",
            f"{mean([r.held for r in runs]):.1f}",
            f"{mean([r.counts.writes / max(1, r.counts.groups) for r in runs]):.2f}",
        ]
        worst, broken = max(r.max_wait for r in runs), sum(r.violations for r in runs)
        rows.append([runs[0].mode, str(runs[0].wait_budget), *values, str(worst), str(broken)])
    times = ["tokens/s", "p95 ready to first, s", "p95 completion, s"]
    waits = ["held", "owners per WRITE group", "max wait", "violations"]
    return markdown_table(["mode", "w", *times, *waits], rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; SystemExit for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for field, value in asdict(DEFAULT).items():
        parser.add_argument(f"--{field}", type=int, default=value, help=f"default {value}")
    parser.add_argument(
        "--costs", type=Path, metavar="FILE.json", help="costs that bench_modes.py found"
    )
    parser.add_argument("--group-cost", type=float, metavar="S", help="of a WRITE group, instead")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all outcomes")
    options = parser.parse_args(arguments)
    if min(options.streams, options.prompt, options.chunk) < 1 or options.decode < 2:
        parser.error("--streams, --prompt and --chunk must be at least 1, --decode at least 2")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, print, and store the outcomes if asked to."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given)
    size = Size(options.streams, options.prompt, options.decode, options.chunk)
    costs = Costs.read(options.costs) if options.costs else Costs()
    if options.group_cost is not None:
        costs = replace(costs, group=options.group_cost)
    runs = [
        Simulation(make(size, 0), costs, mode).run() for mode in MODES for make in TRACES.values()
    ]
    swept = [runs for mode in ("rw", "phase") for runs in sweep(size, costs, mode, BUDGETS)]
    command = command_line(__file__, given, 1)
    stated = ", ".join(f"{name} {value:.6g}" for name, value in asdict(costs).items())
    print(f"`{command}`\n\n{size}; costs in s: {stated}.\n\n{trace_table(runs, runs[0])}\n")
    print(f"Phase-skew trace, means of {SEEDS} seeds:\n\n{sweep_table(swept)}")
    outcomes: list[dict[str, Any]] = [asdict(o) for o in [*runs, *(o for s in swept for o in s)]]
    write_json(options.out, {"command": command, "costs": asdict(costs), "outcomes": outcomes})


if __name__ == "__main__":
    main()
