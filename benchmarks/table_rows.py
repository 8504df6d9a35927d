"""The rows of bench_table.py: which engines answer which streams."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from bench_modes import (
    ALL_UPDATE,
    QUICK_STATE_MB,
    STATE_MB,
    Setup,
    engine_options,
    run_of,
    state_options,
    trace_of,
)
from bench_modes import WORKER as ENGINE
from bench_serving import KV_SLACK, TIMEOUT_S
from common import WorkerFailed, run_worker
from eager_worker import EagerJob
from modes_worker import FAILED, TraceJob, TraceRun
from traces import Size

from sgl_rwttt.srt_ext.attention import CPU_ATTENTION
from sgl_rwttt.srt_ext.launch import engine_defaults

EAGER = Path(__file__).resolve().with_name("eager_worker.py")
OWN_SHARE = 64  # a sibling has one in so many tokens of its prompt for itself
PORTS = 30_100, 500  # of replicas: the first one's, and how far apart


@dataclass
class Bench:
    """What all rows share; `rows` grows as they are measured."""

    options: argparse.Namespace
    model: Path
    base: Path  # the checkpoint without TTT
    size: Size
    prompts: list[list[int]]
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    matched: int | None = None  # serial engines that take the memory of the full row
    used: int | None = None  # those of the row `replicas`

    @property
    def alone(self) -> int:
        """Streams of the rows that run one stream after the other."""
        return min(self.options.serial_streams or self.size.streams, self.size.streams)

    def uniform(self) -> TraceRun:
        """The trace of most rows."""
        return run_of(trace_of("uniform", self.size, 0), self.prompts)

    def siblings(self) -> TraceRun:
        """All prompts begin alike; the last tokens of each are its own."""
        own = max(1, self.size.prompt // OWN_SHARE)
        kept = self.size.prompt - own
        prompts = [self.prompts[0][:kept] + ids[:own] for ids in self.prompts]
        count = self.size.streams
        return TraceRun("siblings", prompts, [self.size.decode] * count, [0.0] * count, fork=kept)

    def job(self, setup: Setup, runs: list[TraceRun], streams: int | None = None) -> TraceJob:
        """An engine of ours for so many streams at once (default: all)."""
        at_once = streams or self.size.streams
        longest = self.size.prompt + 2 * self.size.chunk + self.size.decode
        memory = QUICK_STATE_MB if self.options.quick else STATE_MB
        return TraceJob(
            model=str(self.model),
            options=engine_options(
                self.model,
                self.options.dtype,
                at_once,
                at_once * longest + KV_SLACK,
                setup.chunk,
                attention_backend=self.options.attention_backend,
            ),
            state=state_options(setup, memory),
            runs=runs,
            repeats=self.options.repeats,
        )

    def stock_job(self, backend: str, runs: list[TraceRun]) -> TraceJob:
        """SGLang without state on the base checkpoint, overlap scheduling as in ours."""
        plain = self.job(Setup(), runs)
        options = {
            "max_total_tokens": plain.options["max_total_tokens"],
            "max_running_requests": plain.options["max_running_requests"],
            "dtype": self.options.dtype,
            "skip_tokenizer_init": True,
            "attention_backend": backend,
            "disable_overlap_schedule": self.options.stock_overlap == "off",
        }
        engine = engine_defaults(self.base, **options)
        del engine["model_path"]
        return replace(plain, model=str(self.base), options=engine, state={}, ttt=False)

    def work(self, job: TraceJob, threads: int | None = None) -> list[dict[str, Any]]:
        """The runs of one engine in its own process."""
        variables = {"OMP_NUM_THREADS": str(threads or self.options.threads)}
        if not job.ttt and job.options["attention_backend"] != CPU_ATTENTION:
            variables["SGLANG_PLUGINS"] = "none"
        runs: list[dict[str, Any]] = run_worker(ENGINE, asdict(job), variables, TIMEOUT_S)["runs"]
        return runs

    def take(self, names: dict[str, str], runs: Sequence[dict[str, Any]]) -> None:
        """File an engine's runs under the rows' names, by trace."""
        for run_ in runs:
            if run_["trace"] in names:
                self.rows.setdefault(names[run_["trace"]], []).append(run_)


def serial(bench: Bench) -> None:
    """The reference: an engine for one stream, which has no one to share its memory with."""
    trace = bench.uniform()
    turns = TraceRun(
        "serial",
        trace.prompts[: bench.alone],
        trace.decode[: bench.alone],
        [0.0] * bench.alone,
        in_turn=True,
    )
    job = bench.job(Setup("serial"), [turns], streams=1)
    bench.take({"serial": "serial"}, bench.work(job))


def replicas(bench: Bench) -> None:
    """So many serial engines at once, each with its share of the streams and of the threads."""
    count = replica_count(bench)
    if count == 1:
        bench.rows["replicas"] = bench.rows["serial"]
        return
    shares = [shared(bench.uniform(), part, count, bench.alone) for part in range(count)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(count) as pool:
        threads = max(1, bench.options.threads // count)

        def replica(part: int) -> list[dict[str, Any]]:
            plain = bench.job(Setup("serial"), [shares[part]], streams=1)
            ports = {"port": PORTS[0] + part * PORTS[1]}
            meet = {"folder": folder, "count": count, "name": str(part)}
            try:
                job = replace(plain, options=plain.options | ports, meet=meet)
                return bench.work(job, threads)
            except BaseException:
                (Path(folder) / FAILED).touch()
                raise

        parts = list(pool.map(replica, range(count)))
    bench.rows["replicas"] = [joined(runs) for runs in zip(*parts, strict=True)]


def shared(trace: TraceRun, part: int, count: int, most: int) -> TraceRun:
    """The streams that fall to one of `count` replicas, at most `most`."""
    prompts, decode = trace.prompts[part::count][:most], trace.decode[part::count][:most]
    return TraceRun("replica", prompts, decode, [0.0] * len(prompts), in_turn=True)


def joined(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Replicas that ran at the same time as one run: rates, memory and counts are added up.

    The window is a second long: its tokens are what all replicas decode in a second. Prefill is
    that of the slowest.
    """
    rate = sum(r["timing"]["decode_tokens"] / r["timing"]["decode_seconds"] for r in runs)
    return {
        "trace": "replicas",
        "timing": {
            "tokens": sum(r["timing"]["tokens"] for r in runs),
            "decode_tokens": rate,
            "decode_seconds": 1.0,
            "prefill": max(r["timing"]["prefill"] for r in runs),
        },
        "outputs": [output for r in runs for output in r["outputs"]],
        "peak_mib": sum(r["peak_mib"] for r in runs),
        "state": {"decode_writes": sum(r["state"]["decode_writes"] for r in runs)},
        "planner": {"rows": sum(r["planner"]["rows"] for r in runs)},
    }


def replica_count(bench: Bench) -> int:
    """As many serial engines as take the memory of the full row's, by what was measured.

    Raises WorkerFailed where one of the two was not.
    """
    if not {"full", "serial"} <= set(bench.rows):
        raise WorkerFailed("replicas need the rows serial and full")
    ours, alone = (max(r["peak_mib"] for r in bench.rows[n]) for n in ("full", "serial"))
    bench.matched = max(1, round(ours / alone))
    chosen = bench.options.replicas or bench.matched
    bench.used = min(chosen, bench.size.streams)
    return bench.used


def eager(bench: Bench) -> None:
    """The peer that is not ours."""
    trace = bench.uniform()
    job = EagerJob(
        str(bench.model),
        bench.options.dtype,
        trace.prompts[: bench.alone],
        trace.decode[: bench.alone],
        bench.options.repeats,
    )
    variables = {"OMP_NUM_THREADS": str(bench.options.threads)}
    bench.rows["eager"] = run_worker(EAGER, asdict(job), variables, TIMEOUT_S)["runs"]


def full(bench: Bench) -> None:
    """Three traces on one engine."""
    bursty = run_of(trace_of("bursty-update", bench.size, 0), bench.prompts)
    runs = {"full": bench.uniform(), "bursty": bursty, "siblings": bench.siblings()}
    wanted = [runs[name] for name in ("full", "bursty", "siblings") if name in bench.options.only]
    names = {"uniform": "full", "bursty-update": "bursty", "siblings": "siblings"}
    bench.take(names, bench.work(bench.job(Setup(), wanted)))


def stock(bench: Bench) -> None:
    """The ceiling."""
    runs = {"stock": bench.uniform(), "stock siblings": bench.siblings()}
    wanted = [runs[name] for name in runs if name in bench.options.only]
    job = bench.stock_job(bench.options.attention_backend, wanted)
    bench.take({"uniform": "stock", "siblings": "stock siblings"}, bench.work(job))


def native(bench: Bench) -> None:
    """The ceiling as SGLang itself comes; nothing to do where it has the same backend."""
    backend = engine_defaults(bench.base)["attention_backend"]
    if backend != bench.options.attention_backend:
        job = bench.stock_job(backend, [bench.uniform()])
        bench.take({"uniform": "stock native"}, bench.work(job))


def one(row: str, setup: Setup, trace: str = "uniform") -> Callable[[Bench], None]:
    """A row that is one trace on an engine of its own."""

    def measured(bench: Bench) -> None:
        played = run_of(trace_of(trace, bench.size, 0), bench.prompts)
        bench.take({trace: row}, bench.work(bench.job(setup, [played])))

    return measured


# Rows -> what measures them, in this order: `replicas` needs the memory of the two before it.
ENGINES: dict[tuple[str, ...], Callable[[Bench], None]] = {
    ("serial",): serial,
    ("full", "bursty", "siblings"): full,
    ("replicas",): replicas,
    ("eager",): eager,
    ("phase",): one("phase", Setup("phase", commit="dense")),
    ("commit",): one("commit", Setup("phase")),
    ("all-update",): one("all-update", ALL_UPDATE, "all-update"),
    ("stock", "stock siblings"): stock,
    ("stock native",): native,
}
