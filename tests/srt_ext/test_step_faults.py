"""One forward pass with a fault in it: the owner concerned fails by type, nobody else notices.

The real runtime, step, store and backend, without SGLang around them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_rwttt.backends.in_place_config import InPlaceConfig
from sgl_rwttt.core import faults
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import StaleVersion, StateCapacity, StateError, WriteFailed
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.srt_ext.launch import prepare_environment
from sgl_rwttt.srt_ext.lineage import RequestLineage
from sgl_rwttt.srt_ext.options import ENV_OPTIONS
from sgl_rwttt.srt_ext.runtime import TTTRuntime
from sgl_rwttt.srt_ext.step import forward_step
from tests.assert_close import assert_close

pytestmark = pytest.mark.slow  # failing a request imports SGLang
C = 4
VOCAB = 40
OWNERS = 4
BAD = 2
CONFIG = InPlaceConfig((0, 1), C, 0.05, True, "hidden_states", 16, 32)
PREFILLS = [2 * C + 3, C + 3, 3 * C + 3, C - 1]  # everybody is one token before a boundary


class Bench:
    """Owners of one runtime, and forward passes over all of them."""

    def __init__(self) -> None:
        prepare_environment()
        self.runtime = TTTRuntime(CONFIG, "bench", torch.device("cpu"))
        g = torch.Generator().manual_seed(0)
        self.h = torch.randn(2, VOCAB, 32, generator=g)
        self.x = torch.randn(2, VOCAB, 16, generator=g)
        for slot in range(2):
            weights = torch.randn(16, 1, 5, generator=g), torch.randn(16, 16, generator=g)
            self.runtime.backend.set_weights(slot, *weights)
        self.owners = [self.admit(f"o{i}", PREFILLS[i]) for i in range(OWNERS)]
        self.lengths = [0] * OWNERS

    def admit(self, name: str, prompt: int) -> RequestLineage:
        """A request that got its pool row."""
        root = self.runtime.default_root
        spans = ModeSpans(prompt)
        lineage = RequestLineage(
            owner=name, branch=name, root=root, spans=spans, mode=Effect.WRITE, chunk=C
        )
        store = self.runtime.store
        match = store.match(root.id, [0], ModeSpans(1), 0)
        lineage.state = store.create(name, name, match, root.id, [], ModeSpans())
        self.runtime.bind(len(self.runtime.rows) + 1, lineage)
        return lineage

    def forward(self, counts: Sequence[int], rows: Sequence[int] | None = None) -> list[Tensor]:
        """One forward pass; owner i brings `counts[i]` tokens. The answers of each [2, n, d]."""
        ids = [
            (7 * i + 3 * k) % VOCAB
            for i in range(OWNERS)
            for k in range(self.lengths[i], self.lengths[i] + counts[i])
        ]
        starts = torch.tensor([sum(counts[:i]) for i in range(OWNERS)])
        batch = SimpleNamespace(
            req_pool_indices=torch.tensor(rows or range(1, OWNERS + 1)),
            forward_mode=SimpleNamespace(is_idle=lambda: False, is_decode=lambda: False),
            extend_start_loc=starts,
            extend_seq_lens_cpu=list(counts),
            extend_prefix_lens_cpu=list(self.lengths),
        )
        with forward_step(self.runtime, torch.tensor(ids), batch, None) as step:
            assert step is not None
            out = torch.stack([step.layer(s, self.h[s, ids], self.x[s, ids]) for s in (0, 1)])
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]
        return [out[:, a : a + n] for a, n in zip(starts.tolist(), counts, strict=True)]

    def content(self, index: int) -> tuple[Any, ...]:
        """State id, version number and the pages' bytes of one owner."""
        state = self.owners[index].require_state()
        held = self.runtime.backend.export(state.version)
        tail = b""
        if state.tail is not None:
            h, t = self.runtime.backend.tail(state.tail.page, state.tail.rows, 0)
            tail = h.numpy().tobytes() + t.numpy().tobytes()
        content = {name: rows.numpy().tobytes() for name, rows in held.items()}
        return state.clock.state_id, state.version.number, content, tail

    def page_of(self, index: int) -> Callable[[faults.Context], bool]:
        """Whether a fault point concerns a block of one owner."""

        def when(context: faults.Context) -> bool:
            candidate = self.owners[index].require_state().candidate
            wanted = set(context.get("pages") or [context["page"]])
            return candidate is not None and any(b.page in wanted for b in candidate.blocks)

        return when

    def end(self) -> None:
        """Everybody leaves; nothing may be left."""
        store = self.runtime.store
        for lineage in self.owners:
            store.release(lineage.require_state(), keep_tail=lineage.error is None)
        self.runtime.check_integrity()
        store.flush()
        assert store.stats()["pages_live"] == store.stats()["bases_live"] == 0


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_OPTIONS, '{"memory_mb": 1}')


def prefilled() -> Bench:
    bench = Bench()
    bench.forward(PREFILLS)
    return bench


def of_bad(context: faults.Context) -> bool:
    return bool(context["owner"] == f"o{BAD}")


def skip_the_write(bench: Bench) -> faults.Action:
    def act(context: faults.Context) -> None:
        candidate = bench.owners[BAD].require_state().candidate
        assert candidate is not None
        candidate.written.clear()

    return act


def lines(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    return [r.getMessage() for r in caplog.records if name in r.getMessage()]


WITHOUT_HIM = ("write.begin", "publish.allocated")  # the pass is of the others only
DECODE, PREFILL = [1] * OWNERS, [1, 2 * C, C + 2, 1]


@pytest.mark.parametrize(
    ("kind", "counts"),
    [("write.batch", DECODE), ("write.batch", PREFILL), ("write.candidate", DECODE)],
)
def test_a_write_that_fails_once_is_retried_and_nobody_notices(
    kind: str, counts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: one transient failure that ends a request, or changes a bit of anybody's state.

    A non-finite block inside a prefill is not tried again: its targets are gone by then.
    """
    clean, bench = prefilled(), prefilled()
    expected = clean.forward(counts)
    action = faults.not_finite if kind == "write.candidate" else faults.raising(RuntimeError("x"))
    with faults.armed(kind, action, when=bench.page_of(BAD)), caplog.at_level(logging.WARNING):
        found = bench.forward(counts)
    for index in range(OWNERS):
        assert bench.owners[index].error is None
        assert bench.content(index) == clean.content(index)
        assert torch.equal(found[index], expected[index])
    assert bench.runtime.counters["retried_writes"] > 0
    assert bench.runtime.counters["failed_writes"] == 0
    assert len(lines(caplog, "ttt_write_retried")) == 1
    bench.end()


FAILURES = {
    "exception": ("write.batch", lambda b: faults.raising(RuntimeError("x")), WriteFailed),
    "NaN": ("write.candidate", lambda b: faults.not_finite, WriteFailed),
    "Inf": (
        "write.candidate",
        lambda b: lambda context: faults.not_finite(context, float("inf")),
        WriteFailed,
    ),
    "before anything": ("write.begin", lambda b: faults.raising(RuntimeError("x")), WriteFailed),
    "full pool": ("write.begin", lambda b: faults.raising(StateCapacity("full")), StateCapacity),
    "allocated, not published": (
        "publish.allocated",
        lambda b: faults.raising(RuntimeError("x")),
        WriteFailed,
    ),
    "commit without a write": ("boundary_before_commit", skip_the_write, WriteFailed),
    "stale version": (
        "boundary_before_commit",
        lambda b: faults.raising(StaleVersion("moved")),
        StaleVersion,
    ),
}


@pytest.mark.parametrize("counts", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_step_that_fails_for_one_owner_is_his_alone(
    failure: str, counts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: an owner's failure that ends others, changes their bits, moves his own version or
    leaks a slot."""
    clean, bench = prefilled(), prefilled()
    before = bench.content(BAD)
    expected = clean.forward(counts)
    point, make, error = FAILURES[failure]
    when = bench.page_of(BAD) if point.startswith("write.") and point != "write.begin" else of_bad
    with faults.armed(point, make(bench), when=when, times=None), caplog.at_level(logging.WARNING):
        found = bench.forward(counts)
    for index in range(OWNERS):
        if index == BAD:
            continue
        assert bench.owners[index].error is None
        assert bench.content(index) == clean.content(index)
        if point in WITHOUT_HIM:
            assert_close(found[index], expected[index], 1e-6)
        else:
            assert torch.equal(found[index], expected[index])
    raised = bench.owners[BAD].error
    assert type(raised) is error
    assert (raised.owner, raised.branch) == (f"o{BAD}", f"o{BAD}")
    after = bench.content(BAD)
    assert after[:3] == before[:3], "version or position moved"
    assert bench.runtime.counters["failed_writes"] == 1
    assert len(lines(caplog, "ttt_write_failed")) == 1
    bench.end()


def test_an_owner_at_another_place_than_its_row_fails_alone() -> None:
    """Guards: a row that belongs to another owner: his state must not take its tokens."""
    clean, bench = prefilled(), prefilled()
    clean.forward([1] * OWNERS)
    before = bench.content(BAD)
    bench.lengths[BAD] += 1
    bench.forward([1] * OWNERS)
    assert isinstance(bench.owners[BAD].error, StaleVersion)
    assert bench.content(BAD) == before
    for index in set(range(OWNERS)) - {BAD}:
        assert bench.content(index) == clean.content(index)
    bench.end()


def test_an_owner_twice_in_a_step_is_refused_by_type() -> None:
    """Guards: two rows that write one page."""
    bench = prefilled()
    kept = [bench.content(index) for index in range(OWNERS)]
    bench.lengths[3] = bench.lengths[BAD]
    bench.forward([1] * OWNERS, rows=[1, 2, BAD + 1, BAD + 1])
    error = bench.owners[BAD].error
    assert isinstance(error, StateError) and error.branch == f"o{BAD}"
    assert bench.content(3) == kept[3]
    assert bench.owners[0].error is None and bench.content(0)[1] == kept[0][1] + 1
    bench.end()


def test_an_exception_outside_of_the_writes_drops_everybody() -> None:
    """Guards: a forward pass that raised and still moved somebody."""
    bench = prefilled()
    kept = [bench.content(index) for index in range(OWNERS)]
    with pytest.raises(IndexError):
        bench.h = bench.h[:, :1]
        bench.forward([1] * OWNERS)
    assert [bench.content(index) for index in range(OWNERS)] == kept
    assert all(lineage.require_state().candidate is None for lineage in bench.owners)
    bench.end()
