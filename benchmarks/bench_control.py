"""Cost of commit, rollback and fork, and the memory of a branch, without a server.

Runs the state store and the In-Place backend directly, on the CPU with one thread, and compares
with a private dense copy of the fast weights per branch ([layers, d, d_ff] float32), which is what
a runtime without shared pages has to make or to restore. The copy goes into memory that is there
already, so allocation is not counted against it.

commit     publish a completed block after a decode token: `TTTStateStore.commit` alone
write      BoundaryUpdate of that block in all layers, with its finite check (`finish_step`); apart
rollback   `match` and `create` at half the context, then `release` of the newer branch
fork       `TTTStateStore.fork`, with an open tail of half a chunk and with an empty tail

Every branch that is measured has really read its tokens: activations are random, the state is not
made up. Source of the rule: In-Place TTT (Feng et al. 2026).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from common import Spread, command_line, machine, machine_line, markdown_table, write_json

OWNER = "bench"
SPARE_PAGES = 12  # beyond the context: open pages, forks, and blocks that only memos hold
COPY_SHARE = 5  # dense copies are timed repeats / COPY_SHARE times: they move hundreds of MB
MICROSECONDS = 1e6  # per second


@dataclass(frozen=True)
class Size:
    """One model size of the In-Place rule."""

    d_model: int
    d_ff: int
    layers: int = 3
    chunk: int = 32
    tokens: int = 512  # written by the branch before anything is measured

    @property
    def dense_bytes(self) -> int:
        """Bytes of a private copy of the fast weights, float32."""
        return 4 * self.layers * self.d_model * self.d_ff


SIZES = (Size(576, 1536), Size(4096, 11008))


@dataclass(frozen=True)
class Cost:
    """One operation: microseconds per call and the state bytes that it copies."""

    name: str
    us: Spread
    copied: int


@dataclass(frozen=True)
class Report:
    """Everything measured at one size."""

    size: Size
    repeats: int
    costs: list[Cost]  # control operations
    apart: list[Cost]  # arithmetic of a write, ours and dense
    copy: Cost  # a private dense copy
    memory: dict[str, int]  # what -> bytes


class Bench:
    """A store and a backend of one size; forward passes with random activations."""

    def __init__(self, size: Size) -> None:
        import torch

        from sgl_rwttt.backends.in_place import InPlaceBackend, InPlaceConfig
        from sgl_rwttt.core import SlotPool, TTTStateStore, root_id

        self.size = size
        self.random = torch.Generator().manual_seed(0)
        config = InPlaceConfig(
            layers=tuple(range(size.layers)),
            chunk=size.chunk,
            lr=0.01,
            proj=True,
            target="hidden_states",
            d_model=size.d_model,
            d_ff=size.d_ff,
        )
        pages = size.tokens // size.chunk + SPARE_PAGES
        probe = InPlaceBackend(config, pages=1, bases=1)
        folds = size.tokens // size.chunk // probe.default_fold_pages
        self.backend = InPlaceBackend(config, pages=pages, bases=folds + 2 if folds else 1)
        for pool in (self.backend.H, self.backend.V):
            pool.fill_(0.0)  # touch the memory before anything is timed
        conv, proj = self._normal(size.d_model, 1, 5), self._normal(size.d_model, size.d_model)
        for slot in range(size.layers):
            self.backend.set_weights(slot, conv, proj)
        self.root = root_id("benchmark", config.rule)
        self.pages = SlotPool(pages, "delta page")
        self.bases = SlotPool(self.backend.bases, "dense base")
        self.store = TTTStateStore(
            pages=self.pages,
            bases=self.bases,
            chunk=size.chunk,
            fold_pages=self.backend.default_fold_pages,
            root=self.root,
            copy_rows=self.backend.copy_rows,
        )
        self._names = count()
        self._tokens = count()

    def _normal(self, *shape: int) -> Any:
        import torch

        return torch.randn(*shape, generator=self.random) / shape[-1] ** 0.5

    def new_tokens(self, n: int) -> list[int]:
        """Token ids that were not used before, so that no block is adopted from the memo."""
        return [next(self._tokens) for _ in range(n)]

    def name(self) -> str:
        """A branch name that was not used before."""
        return f"branch-{next(self._names)}"

    def start(self, tokens: Sequence[int], depth: int, chain: Any = None) -> Any:
        """A branch at `depth` of a context whose state is retained there."""
        from sgl_rwttt.core import ModeSpans

        spans = ModeSpans(len(tokens))
        match = self.store.match(self.root, tokens, spans, depth, chain)
        if match.depth != depth:
            raise RuntimeError(f"the state at {depth} was not retained, only at {match.depth}")
        return self.store.create(OWNER, self.name(), match, self.root, tokens, spans)

    def forward(self, state: Any, tokens: Sequence[int]) -> tuple[Any, Any]:
        """Plan `tokens` and run the layers on them; (candidate, step plan), nothing published."""
        from sgl_rwttt.core import Effect

        candidate = self.store.begin_write(state, tokens, Effect.WRITE, 0)
        plan = self.backend.begin_step([candidate.segment])
        for slot in range(self.size.layers):
            h = self._normal(len(tokens), self.size.d_ff)
            target = self._normal(len(tokens), self.size.d_model)
            self.backend.layer_step(plan, slot, h, target)
        return candidate, plan

    def finish(self, candidate: Any, plan: Any) -> None:
        """Run the deferred BoundaryUpdate and mark what was written."""
        if not all(self.backend.finish_step(plan)):
            raise RuntimeError("a write of the benchmark was not finite")
        for page in plan.written_pages(0):
            candidate.mark_written(page)

    def read(self, state: Any, tokens: Sequence[int]) -> None:
        """Let a branch consume `tokens` in one forward, and commit."""
        candidate, plan = self.forward(state, tokens)
        self.finish(candidate, plan)
        self.store.commit(candidate)

    def live_bytes(self) -> int:
        """Bytes of all pages and bases that are handed out."""
        backend = self.backend
        return self.pages.live * backend.page_bytes + self.bases.live * backend.base_bytes


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result) of one call."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def spread_us(seconds: Sequence[float]) -> Spread:
    """Microseconds from seconds."""
    return Spread.of([MICROSECONDS * value for value in seconds])


def measure_write(bench: Bench, trunk: Any, repeats: int) -> tuple[Cost, Cost]:
    """(commit, BoundaryUpdate) of a block that a single decode token completes."""
    commits, updates = [], []
    for _ in range(repeats):
        state = bench.store.fork(trunk, OWNER, bench.name())
        bench.read(state, bench.new_tokens(bench.size.chunk - 1))
        candidate, plan = bench.forward(state, bench.new_tokens(1))
        seconds, _ = timed(partial(bench.finish, candidate, plan))
        updates.append(seconds)
        seconds, versions = timed(partial(bench.store.commit, candidate))
        commits.append(seconds)
        if len(versions) != 1:
            raise RuntimeError(f"{len(versions)} versions from one completed block")
        bench.store.release(state, keep_tail=False)
    chunk_bytes = 4 * bench.size.layers * bench.size.chunk * bench.size.d_model
    return (
        Cost("commit", spread_us(commits), 0),
        Cost("BoundaryUpdate (V of one block)", spread_us(updates), chunk_bytes),
    )


def measure_rollback(bench: Bench, tokens: Sequence[int], repeats: int) -> Cost:
    """Back to the boundary at half the context: match, create, release of the newer branch."""
    from sgl_rwttt.core import ContextChain, ModeSpans

    chunk = bench.size.chunk
    depth = len(tokens) // chunk // 2 * chunk
    chain = ContextChain(bench.root, chunk)  # a server keeps it for every request
    chain.sync(tokens, ModeSpans(len(tokens)))
    newer, seconds = bench.start(tokens, len(tokens), chain), []

    def roll_back() -> Any:
        older = bench.start(tokens, depth, chain)
        bench.store.release(newer)
        return older

    for _ in range(repeats):
        took, older = timed(roll_back)
        seconds.append(took)
        newer = bench.start(tokens, len(tokens), chain)
        bench.store.release(older)
    bench.store.release(newer)
    return Cost(f"rollback from {len(tokens)} to {depth} tokens", spread_us(seconds), 0)


def measure_fork(bench: Bench, state: Any, repeats: int) -> Cost:
    """A new branch at the present point of `state`; its open rows are copied."""
    rows, seconds = state.clock.rows, []
    for _ in range(repeats):
        took, twin = timed(partial(bench.store.fork, state, OWNER, bench.name()))
        seconds.append(took)
        bench.store.release(twin, keep_tail=False)
    size = bench.size
    copied = 4 * size.layers * rows * (size.d_ff + size.d_model)
    what = f"open tail of {rows} rows" if rows else "empty tail"
    return Cost(f"fork, {what}", spread_us(seconds), copied)


def measure_dense(size: Size, repeats: int) -> tuple[Cost, Cost]:
    """(private copy, dense update of one block) of [layers, d, d_ff] float32 fast weights."""
    import torch

    weights = torch.full((size.layers, size.d_model, size.d_ff), 0.01)
    private = torch.full_like(weights, 0.0)
    copies = [timed(lambda: private.copy_(weights))[0] for _ in range(repeats + 1)][1:]
    v = torch.full((size.layers, size.d_model, size.chunk), 0.001)
    h = torch.full((size.layers, size.chunk, size.d_ff), 0.001)
    updates = [timed(lambda: private.baddbmm_(v, h))[0] for _ in range(repeats + 1)][1:]
    return (
        Cost("private dense copy", spread_us(copies), size.dense_bytes),
        Cost("dense update of a private copy (V^T H)", spread_us(updates), size.dense_bytes),
    )


def measure_memory(bench: Bench, trunk: Any) -> dict[str, int]:
    """Bytes that one branch keeps, and that a fork and a version add; counted in the pools.

    Nothing but `trunk` may be live. What only the memo holds is dropped first.
    """
    bench.store.flush()
    kept, bases, pages = bench.live_bytes(), bench.bases.live, bench.pages.live
    twin = bench.store.fork(trunk, OWNER, bench.name())
    empty = bench.live_bytes() - kept
    bench.read(twin, bench.new_tokens(bench.size.chunk // 2))
    open_page = bench.live_bytes() - kept
    bench.read(twin, bench.new_tokens(bench.size.chunk - bench.size.chunk // 2))
    version = bench.live_bytes() - kept
    bench.store.release(twin, keep_tail=False)
    return {
        f"branch after {bench.size.tokens} written tokens (pages {pages}, bases {bases})": kept,
        "fork with an empty tail": empty,
        "fork that has written since (its open page)": open_page,
        "version (one committed block)": version,
    }


def measure(size: Size, repeats: int) -> Report:
    """Everything at one size. Needs about three dense copies of memory plus the pages."""
    bench = Bench(size)
    tokens = bench.new_tokens(size.tokens)
    trunk = bench.start([], 0)
    bench.read(trunk, tokens)
    memory = measure_memory(bench, trunk)
    bench.store.release(trunk)
    # Memory came first: it dropped the older versions that a rollback goes back to.
    bench.store.flush()
    trunk = bench.start([], 0)
    bench.read(trunk, tokens)
    rollback = measure_rollback(bench, tokens, repeats)
    commit, update = measure_write(bench, trunk, repeats)
    empty = measure_fork(bench, trunk, repeats)
    bench.read(trunk, bench.new_tokens(size.chunk // 2))
    half = measure_fork(bench, trunk, repeats)
    bench.store.release(trunk)
    bench.store.flush()
    bench.store.check_integrity()
    copy, dense = measure_dense(size, max(3, repeats // COPY_SHARE))
    costs = [commit, rollback, half, empty]
    return Report(size, repeats, costs, [update, dense], copy, memory)


def times(value: float) -> str:
    """A ratio with about three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def cost_table(reports: Sequence[Report]) -> str:
    """Microseconds per call, and how many times a private copy costs more."""
    rows = []
    for report in reports:
        for cost in (*report.costs, report.copy):
            ratio = report.copy.us.median / cost.us.median
            us, copied = cost.us.text(",.1f"), f"{cost.copied:,}"
            rows.append([size_text(report.size), cost.name, us, copied, times(ratio)])
    header = ["size", "operation", "us per call", "bytes copied", "private copy / this"]
    return markdown_table(header, rows)


def apart_table(reports: Sequence[Report]) -> str:
    """The arithmetic of a write, which commit does not include."""
    rows = [[size_text(r.size), c.name, c.us.text(",.0f")] for r in reports for c in r.apart]
    return markdown_table(["size", "arithmetic of one block, all layers", "us per block"], rows)


def memory_table(reports: Sequence[Report]) -> str:
    """Bytes per thing, and how many times a private copy takes more."""
    rows = []
    for report in reports:
        dense = report.size.dense_bytes
        for what, held in {**report.memory, "private dense copy": dense}.items():
            ratio = times(dense / held) if held else "-"
            rows.append([size_text(report.size), what, f"{held:,}", ratio])
    return markdown_table(["size", "what", "bytes", "private copy / this"], rows)


def size_text(size: Size) -> str:
    """`d x d_ff` of a size."""
    return f"{size.d_model} x {size.d_ff}"


def render(reports: Sequence[Report]) -> str:
    """All tables as Markdown."""
    first = reports[0]
    intro = (
        f"{first.size.layers} state layers, chunks of {first.size.chunk} tokens, float32 pages; "
        f"median of {first.repeats} calls (smallest..largest), dense ones of "
        f"{max(3, first.repeats // COPY_SHARE)}."
    )
    tables = [cost_table(reports), apart_table(reports), memory_table(reports)]
    return "\n\n".join([intro, *tables])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; SystemExit for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=100, help="calls of each (default 100)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default 1)")
    parser.add_argument("--small", action="store_true", help="only the smaller of the two sizes")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all measurements")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads must be at least 1")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and store the raw numbers if asked to."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given)
    import torch

    torch.set_num_threads(options.threads)
    facts = machine(options.threads)
    command = command_line(__file__, given, options.threads)
    reports = [measure(size, options.repeats) for size in SIZES[: 1 if options.small else None]]
    print(f"{machine_line(facts)}\n\n`{command}`\n\n{render(reports)}")
    results = [asdict(report) for report in reports]
    write_json(
        options.out,
        {"benchmark": "control", "machine": facts, "command": command, "results": results},
    )


if __name__ == "__main__":
    main()
