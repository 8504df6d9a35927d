"""Microseconds that planning one decode step takes, by the number of running owners.

The planner alone, without a server, over a decode loop of one rule, shape and placement: after each
issued transition an owner comes to a boundary with probability 1/32. `greedy` has no wait budget;
with `waiting` owners are held for up to 8 steps, and groups are issued and cut at 64. The calls
include looking up every owner's committed version in a dictionary, as in the runtime.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common import Spread, command_line, machine, machine_line, markdown_table, write_json

from sgl_rwttt.core import BatchPlanner, Effect, Transition

OWNERS = (8, 32, 256, 1024, 4096)
CHUNK = 32
SEED = 0
WARMUP = 20  # calls
SHAPE = ("float32", (10, 20, 29), 576, 1536, CHUNK, 0.001834)
PLANNERS = {"greedy": (None, 0), "waiting": (64, 8)}  # target_batch, wait_budget


@dataclass(frozen=True)
class Cost:
    """One row of the table."""

    owners: int
    planner: str
    us: Spread  # per plan()
    held: int  # owner-steps held back in all calls


class Loop:
    """Running owners that decode one token per issued transition."""

    def __init__(self, owners: int, target: int | None, budget: int) -> None:
        self.planner = BatchPlanner(target, budget)
        self.chance = random.Random(SEED)
        self.versions = {(f"owner {i}", "main"): 0 for i in range(owners)}
        self.effects = dict.fromkeys(self.versions, Effect.READ)

    def version(self, owner: str, branch: str) -> int:
        """The committed version of a branch."""
        return self.versions[owner, branch]

    def step(self) -> tuple[float, int]:
        """Plan and carry out one step; (seconds in plan(), owners held)."""
        ready = [
            Transition(*name, "in_place", SHAPE, self.effects[name], version, "cpu")
            for name, version in self.versions.items()
        ]
        start = time.perf_counter()
        planned = self.planner.plan(ready, self.version)
        seconds = time.perf_counter() - start
        for group in planned.groups:
            for step in group.transitions:
                name = (step.owner, step.branch)
                self.versions[name] += step.effect is Effect.WRITE
                at_boundary = self.chance.random() < 1 / CHUNK
                self.effects[name] = Effect.WRITE if at_boundary else Effect.READ
        return seconds, len(planned.held)


def measure(owners: int, planner: str, steps: int) -> Cost:
    """`steps` calls after some for warm-up."""
    loop = Loop(owners, *PLANNERS[planner])
    for _ in range(WARMUP):
        loop.step()
    taken = [loop.step() for _ in range(steps)]
    return Cost(
        owners,
        planner,
        Spread.of([seconds * 1e6 for seconds, _ in taken]),
        sum(held for _, held in taken),
    )


def render(costs: Sequence[Cost]) -> str:
    """The table; the last column shows whether the cost is linear."""
    rows = [
        [
            str(cost.owners),
            cost.planner,
            cost.us.text(",.0f"),
            f"{cost.us.median / cost.owners:.2f}",
        ]
        for cost in costs
    ]
    return markdown_table(["running owners", "planner", "us per plan()", "us per owner"], rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; SystemExit for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="calls of each row (default 200)")
    parser.add_argument("--owners", type=int, nargs="+", default=list(OWNERS))
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all measurements")
    options = parser.parse_args(arguments)
    if min(options.steps, *options.owners) < 1:
        parser.error("--steps and --owners must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and store the raw numbers if asked to."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given)
    facts, command = machine(1), command_line(__file__, given, 1)
    costs = [measure(n, name, options.steps) for name in PLANNERS for n in options.owners]
    print(f"{machine_line(facts)}\n\n`{command}`\n\n{render(costs)}")
    results = [asdict(cost) for cost in costs]
    write_json(
        options.out,
        {"benchmark": "planner", "machine": facts, "command": command, "results": results},
    )


if __name__ == "__main__":
    main()
