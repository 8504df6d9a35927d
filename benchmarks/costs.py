"""What a decode step costs: the linear model of the simulation, and how it is fitted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Costs:
    """Seconds. The defaults are the embedded model in float32 on two CPU cores.

    They follow from the first tables of docs/benchmarks.md: 28.7 tokens/s in a batch of 8 and 10.2
    alone, 8 x 512 prompt tokens in 10 s, 3 ms for the BoundaryUpdate of one block. What a WRITE
    group costs beside its owners cannot be told from those.
    """

    forward: float = 0.072  # a forward pass, whatever it holds
    row: float = 0.0258  # one row of it
    group: float = 0.0  # a WRITE group, whatever it holds
    write: float = 0.003  # one owner of it
    prefill_token: float = 0.0024

    @classmethod
    def read(cls, path: Path) -> Costs:
        """From a report of bench_modes.py, or any JSON object with costs under the key `costs`.

        Raises ValueError for another content.
        """
        given = json.loads(path.read_text(encoding="utf-8"))
        names = {field.name for field in fields(cls)}
        costs = given.get("costs") if isinstance(given, dict) else None
        if isinstance(costs, dict) and isinstance(costs.get("costs"), dict):
            costs = costs["costs"]  # of a report, beside how far off they are
        if not isinstance(costs, dict) or set(costs) != names:
            raise ValueError(f"{path}: 'costs' must hold exactly {sorted(names)}")
        return cls(**{name: float(value) for name, value in costs.items()})


@dataclass
class Counts:
    """What a run did; `fit` finds the costs from these and the seconds they took."""

    forwards: int = 0  # of decode
    rows: int = 0
    groups: int = 0  # WRITE groups
    writes: int = 0


def seconds(costs: Costs, done: Counts) -> float:
    """The time that some decode work takes."""
    return (
        done.forwards * costs.forward
        + done.rows * costs.row
        + done.groups * costs.group
        + done.writes * costs.write
    )


def fit(samples: Sequence[tuple[Counts, float]], prefill_token: float) -> Costs:
    """Costs of decode by least squares over (counts, seconds); none below zero.

    A cost that would come out negative is set to zero and the others are fitted again.
    """
    import numpy as np

    names = [field.name for field in fields(Counts)]
    work = np.array([[getattr(counts, name) for name in names] for counts, _ in samples], float)
    took = np.array([spent for _, spent in samples])
    kept, found = list(range(len(names))), np.zeros(len(names))
    while kept:
        solved = np.linalg.lstsq(work[:, kept], took, rcond=None)[0]
        if solved.min() >= 0:
            found[kept] = solved
            break
        kept.pop(int(solved.argmin()))
    forward, row, group, write = (float(cost) for cost in found)
    return Costs(forward, row, group, write, prefill_token)


def fitted_costs(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Costs from the greedy runs of bench_modes.py, and how far off they are.

    Uses the runs of mode rw without wait and with the owner's commit, of traces whose streams start
    together. `error` is the largest deviation of a decode window, as a share of it.
    """
    plain = {"mode": "rw", "wait_budget": 0, "commit": "owner"}
    used = [run for run in runs if run["simulated"] and plain.items() <= run["setup"].items()]
    samples = [(Counts(**run["simulated"]), run["timing"]["decode_seconds"]) for run in used]
    uniform = [run for run in used if run["trace"] == "uniform"]
    prefill = min(run["timing"]["prefill"] / run["prompt_tokens"] for run in uniform)
    costs = fit(samples, prefill)
    error = max(abs(seconds(costs, counts) / took - 1) for counts, took in samples)
    return {"costs": asdict(costs), "error": error, "samples": len(samples)}
