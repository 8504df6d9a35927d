"""One READ of one layer on the CPU: pages against a loop over owners and against private weights.

Every case is one decode row per owner. Three ways to compute what the state adds to ``W_0 h``:

this      ``apply_state`` over the page pools
loop      two matrix products per owner, ``(h H^T) V``, in a Python loop
private   ``torch.bmm`` over a dense weight matrix of its own per owner; without it there would be
          no W_0 to share, so it replaces that product too, which is not counted here

The three take turns on the tensors of several layers, and each is at another layer than the other
two, so that its data comes from memory as in a model. Source of the rule: In-Place TTT (Feng et
al. 2026).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import Spread, command_line, machine, machine_line, markdown_table, write_json

MICROSECONDS = 1e6  # per second
WARM_UP = 3  # turns that are not counted


@dataclass(frozen=True)
class Size:
    """Shapes of one state layer and what each owner has written."""

    d_model: int = 576
    d_ff: int = 1536
    chunk: int = 32
    pages: int = 8  # per owner
    owners: int = 8
    layers: int = 6  # whose tensors take turns


@dataclass(frozen=True)
class Case:
    """One layout of the owners' pages, timed three ways."""

    name: str
    owners: int
    us: dict[str, Spread]  # "this", "loop", "private": microseconds per READ


class Pools:
    """Page pools and private weights of several layers, of random numbers."""

    def __init__(self, size: Size, dtype: Any) -> None:
        import torch

        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Any:
            return torch.randn(*shape, generator=generator).to(dtype)

        rows = (size.owners * size.pages + 1) * size.chunk
        depth = size.layers
        self.H = [normal(rows, size.d_ff) for _ in range(depth)]
        self.V = [normal(rows, size.d_model) for _ in range(depth)]
        self.W = [normal(size.owners, size.d_model, size.d_ff) for _ in range(depth)]
        self.h = normal(size.owners, size.d_ff)
        self.D = torch.zeros(1, size.d_model, size.d_ff)


Owned = list[tuple[int, ...]]  # the pages of each owner, oldest first


def page_lists(size: Size) -> dict[str, list[Owned]]:
    """Case -> its owners' pages, in one or more places that take turns."""
    owners, pages = size.owners, size.pages
    adjacent = [tuple(range(1 + i * pages, 1 + (i + 1) * pages)) for i in range(owners)]
    mixed = [tuple(range(1 + i, 1 + owners * pages, owners)) for i in range(owners)]
    cases = {
        f"{owners} owners, each one's pages adjacent": [adjacent],
        f"{owners} owners, pages in turns": [mixed],
    }
    for count in (1, 2, 4, 8):
        if count <= owners:
            name = "1 owner" if count == 1 else f"{count} siblings, same pages"
            cases[name] = [[owned] * count for owned in adjacent]
    return cases


def measure_case(size: Size, pools: Pools, name: str, places: list[Owned], repeats: int) -> Case:
    """Time one case; raises RuntimeError when the loop and ``apply_state`` do not agree."""
    import torch

    from sgl_rwttt.kernels import kernel
    from sgl_rwttt.kernels.apply_state.plan import ReadPart, merge_ranges, plan_read

    cpu, chunk, count = torch.device("cpu"), size.chunk, len(places[0])
    apply_state = kernel("apply_state")
    h, out = pools.h[:count], torch.zeros(count, size.d_model)
    plans, runs = [], []
    for owners in places:
        parts = [[ReadPart(i, 1, None, owned)] for i, owned in enumerate(owners)]
        plans.append(plan_read(parts, chunk, cpu))
        runs.append([merge_ranges((p * chunk, (p + 1) * chunk) for p in o) for o in owners])

    def this(layer: int, place: int) -> None:
        apply_state(h, out, plans[place], pools.H[layer], pools.V[layer], pools.D)

    def loop(layer: int, place: int) -> None:
        for row, owned in enumerate(runs[place]):
            for first, end in owned:
                scores = h[row : row + 1] @ pools.H[layer][first:end].T
                out[row : row + 1] += scores @ pools.V[layer][first:end]

    def private(layer: int, place: int) -> None:
        first = place * count % size.owners
        torch.bmm(h[:, None], pools.W[layer][first : first + count].transpose(1, 2))

    results = []
    for way in (this, loop):
        out.zero_()
        way(0, 0)
        results.append(out.clone())
    if not torch.allclose(*results, rtol=0.05, atol=0.05 * float(results[1].std())):
        raise RuntimeError(f"{name}: the two READs differ")
    ways = {"this": this, "loop": loop, "private": private}
    return Case(name, count, take_turns(ways, size.layers, len(places), repeats))


def take_turns(
    ways: dict[str, Callable[[int, int], None]], layers: int, places: int, repeats: int
) -> dict[str, Spread]:
    """Microseconds per call of each way."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(-WARM_UP, repeats):
        for index, (name, way) in enumerate(ways.items()):
            at = turn + index * layers // len(ways)
            start = time.perf_counter()
            way(at % layers, at // layers % places)
            if turn >= 0:
                seconds[name].append(time.perf_counter() - start)
    return {name: Spread.of([MICROSECONDS * s for s in taken]) for name, taken in seconds.items()}


def measure(size: Size, dtype_name: str, repeats: int) -> list[Case]:
    """All cases in one dtype."""
    import torch

    with torch.inference_mode():
        pools = Pools(size, getattr(torch, dtype_name))
        return [
            measure_case(size, pools, name, places, repeats)
            for name, places in page_lists(size).items()
        ]


def render(report: dict[str, list[Case]]) -> str:
    """One table: microseconds of ``apply_state``, and ratios of medians."""
    rows = []
    for dtype_name, cases in report.items():
        (one,) = (case.us["this"].median for case in cases if case.owners == 1)
        for case in cases:
            this = case.us["this"].median
            others = (case.us["loop"].median / this, case.us["private"].median / this, this / one)
            rows.append(
                [dtype_name, case.name, case.us["this"].text(",.0f")]
                + [f"{ratio:.2f}" for ratio in others]
            )
    header = ["dtype", "case", "us per READ", "loop / this", "private / this", "this / 1 owner"]
    return markdown_table(header, rows)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; SystemExit for wrong usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=60, help="turns that are timed")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the raw measurements, JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Measure, print the table, write JSON if asked."""
    options = parse(arguments)
    facts = machine(options.threads)
    import torch

    torch.set_num_threads(options.threads)
    size = Size()
    report = {name: measure(size, name, options.repeats) for name in options.dtype}
    print(machine_line(facts))
    print("\n`" + command_line(__file__, arguments, options.threads) + "`\n")
    print(
        f"One READ of one layer, d {size.d_model}, d_ff {size.d_ff}, {size.pages} pages of "
        f"{size.chunk} rows per owner, one row per owner; median of {options.repeats} "
        "(smallest..largest).\n"
    )
    print(render(report))
    cases = {name: [asdict(case) for case in cases] for name, cases in report.items()}
    write_json(options.out, {"machine": facts, "size": asdict(size), "cases": cases})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
