"""One forward pass with a fault in it: the owner concerned fails by type, nobody else notices.

The real runtime, step, store and backend, without SGLang around them.
"""

from __future__ import annotations

import logging

import pytest
import torch

from sgl_rwttt.core import faults
from sgl_rwttt.core.errors import StaleVersion, StateCapacity, StateError, WriteFailed
from sgl_rwttt.srt_ext.options import ENV_OPTIONS
from tests.assert_close import assert_close
from tests.srt_ext.step_bench import OWNERS, PREFILLS, Bench, C

pytestmark = pytest.mark.slow  # failing a request imports SGLang
BAD = 2


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
