"""Prometheus metrics of the state runtime, at ``GET /metrics`` beside SGLang's own.

They exist only with ``--enable-metrics``. Labels are bounded: the served model's name, with several
data-parallel ranks the rank, and fixed words or names of error classes. No metric names an owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_rwttt.core.effects import Effect

from .ranks import own_rank

if TYPE_CHECKING:
    from .runtime import TTTRuntime

PREFIX = "sgl_rwttt_"

# What `count` takes -> help text. Prometheus shows them as sgl_rwttt_<name>_total.
COUNTERS = {
    "commits": "Versions committed.",
    "rollbacks": "Requests that continued their parent from before its end.",
    "forks": "Requests whose parent had another child already.",
    "failed_writes": "Requests ended by a write that failed.",
    "snapshot_saves": "Snapshots written.",
    "snapshot_restores": "Snapshots read.",
    "snapshot_hits": "Restores that found their version still retained.",
}

# Counted by the store and the runtime anyway, read at each refresh.
_READ_COUNTERS = {
    "admissions": "Requests that got a state.",
    "reused_tokens": "Prompt tokens whose state and KV were reused.",
    "retried_writes": "Blocks whose update failed in its group and was computed alone.",
    "aborted": "Requests whose client went away.",
    "retracted": "Runs stopped for want of memory, to be continued.",
    "adoptions": "Blocks whose version was retained already.",
    "folds": "Versions folded into a dense base.",
    "evictions": "Memos dropped because slots were needed.",
    "expirations": "Versions dropped by --ttt-retained-versions or with a closed root.",
}

_GAUGES = {
    "owners": "Open owners (sessions).",
    "running_branches": "Branches with a live state.",
    "versions": "Versions retained, roots included.",
    "retained_tails": "Open pages retained behind a version.",
    "roots": "Roots kept open by owners.",
    "pins": "Named points kept by owners.",
    "state_bytes": "Bytes of the pages and bases in use.",
    "state_capacity_bytes": "Bytes of all pages and bases.",
}

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_WAITS = (0, 1, 2, 4, 8, 16, 32, 64)


class TTTMetrics:
    """No metrics (``--enable-metrics`` is off): every call does nothing."""

    enabled = False

    def group(self, effect: Effect, size: int) -> None:
        """One operator group of ``size`` owners ran."""

    def wait(self, steps: int) -> None:
        """A boundary ran ``steps`` decode steps after it was ready."""

    def count(self, name: str, n: int = 1) -> None:
        """Count ``n`` events; ``name`` is a key of ``COUNTERS``."""

    def refused(self, kind: str) -> None:
        """Count one refusal by the name of its error class."""

    def refresh(self, runtime: TTTRuntime, owners: int = 0) -> None:
        """Set the gauges from the store's counts; ``owners`` is the number of open sessions."""


class PrometheusMetrics(TTTMetrics):
    """The metrics of one scheduler process."""

    enabled = True

    def __init__(self, model_name: str, rank: int | None = None) -> None:
        # Imported late: prometheus_client decides on multi-process files when it is imported.
        from prometheus_client import Counter, Gauge, Histogram

        self._labels = {"model_name": model_name} | ({} if rank is None else {"dp_rank": str(rank)})

        def named(kind: Any, name: str, text: str, *more: str, **options: Any) -> Any:
            metric = kind(PREFIX + name, text, (*self._labels, *more), **options)
            return metric if more else metric.labels(**self._labels)

        def gauge(name: str, text: str, *more: str) -> Any:
            return named(Gauge, name, text, *more, multiprocess_mode="mostrecent")

        texts = COUNTERS | _READ_COUNTERS
        self._counters = {name: named(Counter, name, text) for name, text in texts.items()}
        self._refused = named(Counter, "refused_requests", "Requests refused.", "error")
        self._gauges = {name: gauge(name, text) for name, text in _GAUGES.items()}
        self._slots = {
            name: gauge(name, f"Slots of the {name[:-1]} pool by use.", "kind")
            for name in ("pages", "bases")
        }
        sizes = named(
            Histogram, "group_owners", "Owners per operator group.", "effect", buckets=_SIZES
        )
        self._sizes = {
            e: sizes.labels(**self._labels, effect=e.value) for e in (Effect.READ, Effect.WRITE)
        }
        text = "Decode steps between readiness and issue of a write."
        self._waits = named(Histogram, "write_wait_steps", text, buckets=_WAITS)
        self._seen: dict[str, int] = {}

    def group(self, effect: Effect, size: int) -> None:
        self._sizes[effect].observe(size)

    def wait(self, steps: int) -> None:
        self._waits.observe(steps)

    def count(self, name: str, n: int = 1) -> None:
        self._counters[name].inc(n)

    def refused(self, kind: str) -> None:
        self._refused.labels(**self._labels, error=kind).inc()

    def refresh(self, runtime: TTTRuntime, owners: int = 0) -> None:
        stats, pool = runtime.store.stats(), runtime.backend.report()
        self._read_counters(stats, runtime.counters)
        page, base = pool["page_bytes"], pool["base_bytes"]
        self._set(
            owners=owners,
            running_branches=stats["owners"],
            versions=stats["versions"],
            retained_tails=stats["tails"],
            roots=stats["roots"],
            pins=stats["pins"],
            state_bytes=stats["pages_live"] * page + stats["bases_live"] * base,
            state_capacity_bytes=(pool["pages"] * page + pool["bases"] * base),
        )
        tails = stats["pages_live"] - stats["pages_version"]
        self._set_slots("pages", stats, version=stats["pages_version"], tail=tails)
        self._set_slots("bases", stats, live=stats["bases_live"])

    def _set(self, **values: int) -> None:
        for name, value in values.items():
            self._gauges[name].set(value)

    def _set_slots(self, name: str, stats: dict[str, int], **used: int) -> None:
        total, free, live = (stats[f"{name}_{kind}"] for kind in ("total", "free", "live"))
        for kind, count in {**used, "free": free, "reserved": total - free - live}.items():
            self._slots[name].labels(**self._labels, kind=kind).set(count)

    def _read_counters(self, stats: dict[str, int], counters: dict[str, int]) -> None:
        numbers = {**stats, **counters, "reused_tokens": counters["hit_tokens"]}
        for name in _READ_COUNTERS:
            value = numbers[name]
            self._counters[name].inc(value - self._seen.get(name, 0))
            self._seen[name] = value


def make_metrics() -> TTTMetrics:
    """The metrics that this server's flags ask for; call it in the scheduler process."""
    from sglang.srt.runtime_context import get_context, get_observability, get_serving

    published = get_context().is_config_namespace_published("observability")
    if not published or not get_observability().enable_metrics:
        return TTTMetrics()
    rank, ranks = own_rank()
    return PrometheusMetrics(str(get_serving().served_model_name), rank if ranks > 1 else None)
