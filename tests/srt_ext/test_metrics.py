"""The metrics, and what the scheduler does for them and for idle owners, without a server."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.srt_ext import housekeeping
from sgl_rwttt.srt_ext.housekeeping import Housekeeping
from sgl_rwttt.srt_ext.metrics import COUNTERS, PrometheusMetrics, TTTMetrics
from sgl_rwttt.srt_ext.runtime import _COUNTED
from tests.backends.in_place_rig import Rig

MODEL = "toy"


@pytest.fixture(scope="module")
def metrics() -> PrometheusMetrics:
    return PrometheusMetrics(MODEL)


def sample(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"sgl_rwttt_{name}", {"model_name": MODEL, **labels})


def test_metrics_show_the_books(metrics: PrometheusMetrics) -> None:
    """Guards: a gauge of another count, or a counter that counts again at every refresh."""
    rig = Rig(chunk=4, pages=12, bases=3)
    counters = dict.fromkeys(_COUNTED, 0) | {"admissions": 3, "hit_tokens": 7}
    runtime: Any = SimpleNamespace(store=rig.store, backend=rig.backend, counters=counters)
    state = rig.start("a")
    rig.write(state, list(range(9)))
    rig.store.pin("a", "here", state)
    for _ in range(3):
        metrics.refresh(runtime, owners=5)
    kinds = {kind: sample("pages", kind=kind) for kind in ("version", "tail", "free", "reserved")}
    assert kinds == {"version": 2, "tail": 1, "free": 8, "reserved": 1}
    assert sum(filter(None, kinds.values())) == rig.store.stats()["pages_total"]
    assert (sample("bases", kind="live"), sample("bases", kind="free")) == (0, 2)
    assert (sample("owners"), sample("running_branches"), sample("pins")) == (5, 1, 1)
    assert sample("versions") == 3
    assert sample("state_bytes") == 3 * rig.backend.page_bytes
    assert (sample("admissions_total"), sample("reused_tokens_total")) == (3, 7)


def test_events_are_counted_by_name(metrics: PrometheusMetrics) -> None:
    """Guards: an event without its metric, and label values without bound."""
    for name in COUNTERS:
        metrics.count(name)
        metrics.count(name, 2)
        assert sample(f"{name}_total") == 3
    metrics.refused("StaleVersion")
    assert sample("refused_requests_total", error="StaleVersion") == 1
    for size in (1, 3, 3, 1000):
        metrics.group(Effect.WRITE, size)
    metrics.wait(0)
    metrics.wait(3)
    assert sample("group_owners_count", effect="write") == 4
    assert sample("group_owners_bucket", effect="write", le="4.0") == 3
    assert sample("write_wait_steps_bucket", le="0.0") == 1
    assert sample("write_wait_steps_sum") == 3


def test_a_rank_has_series_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the gauges of one data-parallel rank written over by another's."""
    registry = CollectorRegistry()
    for kind in ("Counter", "Gauge", "Histogram"):
        apart = partial(getattr(prometheus_client, kind), registry=registry)
        monkeypatch.setattr(prometheus_client, kind, apart)
    of_rank = PrometheusMetrics(MODEL, 1)
    of_rank.refused("UnknownOwner")
    of_rank.group(Effect.READ, 2)
    of_rank.count("commits")
    rig = Rig(chunk=4, pages=12, bases=3)
    counters = dict.fromkeys(_COUNTED, 0)
    of_rank.refresh(SimpleNamespace(store=rig.store, backend=rig.backend, counters=counters), 5)  # type: ignore[arg-type]
    rank = {"model_name": MODEL, "dp_rank": "1"}
    for name, more, value in (
        ("owners", {}, 5),
        ("pages", {"kind": "free"}, 11),
        ("commits_total", {}, 1),
        ("refused_requests_total", {"error": "UnknownOwner"}, 1),
        ("group_owners_sum", {"effect": "read"}, 2),
    ):
        assert registry.get_sample_value(f"sgl_rwttt_{name}", {**rank, **more}) == value, name


def test_without_the_flag_nothing_is_counted() -> None:
    """Guards: calls that fail, or cost, when metrics are off."""
    off = TTTMetrics()
    off.group(Effect.READ, 3)
    off.wait(1)
    off.count("no such metric")
    off.refused("X")
    off.refresh(None)  # type: ignore[arg-type]
    assert off.enabled is False


class Stock:
    """The parts of SGLang's scheduler that the overrides call."""

    def process_input_requests(self, messages: list[Any]) -> None: ...
    def on_idle(self) -> None: ...


class Busy(Housekeeping, Stock):
    def __init__(self, enabled: bool = True) -> None:
        self.refreshed: list[int] = []
        metrics = SimpleNamespace(
            enabled=enabled, refresh=lambda runtime, owners: self.refreshed.append(owners)
        )
        self.ttt = SimpleNamespace(metrics=metrics, rows={})
        self.session_controller = SimpleNamespace(sessions={})
        self.waiting_queue: list[Any] = []
        self.grammar_manager = SimpleNamespace(grammar_queue=[])

    @staticmethod
    def _tokenized_requests(message: Any) -> tuple[Any, ...]:
        return (message,) if hasattr(message, "session_params") else ()


def test_gauges_are_set_once_a_second_and_before_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: gauges that cost every step, or that show the last busy second for hours."""
    now = [100.0]
    monkeypatch.setattr(housekeeping.time, "monotonic", lambda: now[0])
    scheduler = Busy()
    scheduler.process_input_requests([])
    assert scheduler.refreshed == [0]
    for _ in range(50):
        now[0] += 0.01
        scheduler.process_input_requests(["a message"])
    assert len(scheduler.refreshed) == 1
    scheduler.session_controller.sessions = {"a": None}
    for _ in range(50):
        scheduler.on_idle()
    assert scheduler.refreshed == [0, 1]
    now[0] += 1.0
    scheduler.on_idle()
    assert len(scheduler.refreshed) == 3
    off = Busy(enabled=False)
    off.process_input_requests(["a message"])
    off.on_idle()
    assert off.refreshed == []


def test_who_runs_waits_or_is_named_is_not_idle() -> None:
    """Guards: an owner that times out under its own long request, or with its renewal unread."""
    scheduler = Busy()
    names = ("running", "waiting", "compiling", "renewed", "told", "asked", "idle")
    owners = {name: SimpleNamespace(last_active_time=-1.0) for name in names}
    scheduler.session_controller.sessions = owners
    stateless = SimpleNamespace(session=None)
    scheduler.ttt.rows = {1: SimpleNamespace(req=SimpleNamespace(session=owners["running"]))}
    scheduler.waiting_queue = [stateless, SimpleNamespace(session=owners["waiting"])]
    scheduler.grammar_manager.grammar_queue = [SimpleNamespace(session=owners["compiling"])]
    messages = [
        SimpleNamespace(op="renew", args='{"owners": ["unknown", "renewed", ["idle"], 5]}'),
        SimpleNamespace(op="unpin", args='{"owner": "told", "name": "idle"}'),
        SimpleNamespace(session_params=SimpleNamespace(id="asked")),
        SimpleNamespace(session_params=SimpleNamespace(id=["idle"])),
        SimpleNamespace(session_params=None),
        *(SimpleNamespace(op="close", args=text) for text in ("", "[", "[]", '{"owner": {}}')),
        "another message",
    ]
    scheduler.process_input_requests(messages)
    assert [name for name in names if owners[name].last_active_time < 0] == ["idle"]
