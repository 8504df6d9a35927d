"""Limits: what they refuse and in which words, and that nothing grows behind them.

The store and the backend are real, at toy size; SGLang's session controller is a stand-in.
"""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import RollbackBeyondRetention, StateCapacity, UnknownState
from sgl_rwttt.core.retention import RetentionWindow
from sgl_rwttt.core.slots import SlotPool
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.srt_ext import limits
from sgl_rwttt.srt_ext.limits import check_branches, check_place, check_roots, retained_window
from sgl_rwttt.srt_ext.options import TTTOptions
from tests.backends.in_place_rig import Rig, some_tokens
from tests.field.rig import C, Field, prompt

TABLES = (dict, list, set, deque, array)


# what grows


def tables(root: object, path: str) -> Iterator[tuple[str, int]]:
    """(path, length) of every container reachable from `root`; tensors and tuples are content."""
    seen: set[int] = set()
    todo = [(root, path)]
    while todo:
        found, name = todo.pop()
        if id(found) in seen or isinstance(found, torch.Tensor | type | str | bytes):
            continue
        seen.add(id(found))
        if isinstance(found, TABLES):
            yield name, len(found)
            values = found.values() if isinstance(found, dict) else found
            todo += [(value, f"{name}[]") for value in values]
            continue
        fields = getattr(type(found), "__slots__", ())
        values = {slot: getattr(found, slot, None) for slot in fields}
        values |= getattr(found, "__dict__", {})
        todo += [(value, f"{name}.{key}") for key, value in values.items()]


def sizes(rig: Rig) -> dict[str, int]:
    """Length of each table of the store and the backend, once nothing but the root is retained.

    What a slot's history leaves (generation, order of the free list) is not growth; neither is
    the plan of the last forward pass.
    """
    rig.store.flush()
    rig.store.check_integrity()
    total: dict[str, int] = {}
    for name, length in [*tables(rig.store, "store"), *tables(rig.backend, "backend")]:
        if "_read_cache" not in name:
            total[name] = total.get(name, 0) + length
    return total


def cycle(rig: Rig, number: int) -> None:
    """One owner: opened, appended to over a boundary or not, pinned or cleared, closed."""
    owner, tokens = f"owner-{number}", some_tokens(3 + number % 7, seed=number)
    state = rig.start(owner, tokens)
    rest = tokens[state.clock.position :]
    if rest:
        candidates = rig.begin([(state, rest, Effect.WRITE)])
        plan, good, _ = rig.run(candidates, [rest])
        for page in plan.written_pages(0):
            candidates[0].mark_written(page)
        rig.store.commit(candidates[0])
        assert all(good)
    if number % 3 == 0:
        rig.store.pin(owner, "here", state)
    if number % 5 == 0:
        rig.store.open_root(owner, state.version)
    rig.store.release(state, keep_tail=number % 2 == 0)
    rig.store.release_owner(owner)


@pytest.mark.slow
def test_ten_thousand_owners_leave_no_trace() -> None:
    """Guards: memory, a slot or a table entry that stays behind each owner.

    Bound: 2 MiB of resident memory over 8,000 owners after a warm-up of 2,000, which is less than
    the 300 bytes of one more record per owner.
    """
    rig = Rig(chunk=C, fold_pages=2, pages=40, bases=4, d_model=8, d_ff=12, layers=1)
    process = psutil.Process()
    start, resident = sizes(rig), 0
    for number in range(10_000):
        cycle(rig, number)
        if number % 1000 == 999:
            stats = rig.store.stats()
            assert stats["owners"] == stats["roots"] == stats["pins"] == 0
            assert sizes(rig) == start
            assert (rig.store._pages.live, rig.store._bases.live) == (0, 0)
        if number == 1999:
            gc.collect()
            resident = process.memory_info().rss
    gc.collect()
    growth = process.memory_info().rss - resident
    assert growth < 2 << 20, f"{growth} bytes"
    assert rig.store.stats()["evictions"] > 1000


# versions


def test_a_lineage_keeps_k_versions_and_recomputes_older_ones() -> None:
    """Guards: K exceeded, or a rollback beyond K that gives another state than a cold run."""
    kept, fold = 5, 2
    window = retained_window(TTTOptions(retained_versions=kept), fold, bases=4)
    assert window == kept - fold + 1
    field = Field(pages=24, bases=5, fold_pages=fold)
    context = prompt(12 * C)
    owner = field.open("a")
    newest = RetentionWindow(field.store, window, ContextChain(field.root, C), 0)
    for token in context:
        before = set(field.store._index.versions)
        owner.feed([token])
        versions = field.store._index.versions
        newest.passed([versions[i] for i in versions if i not in before])
        field.after()
        assert len(versions) - 1 <= kept
    owner.check()
    near, far = 11 * C + 1, 3 * C + 1
    for length in (near, far):
        field.hits = 0
        owner = owner.rollback(length)
        owner.check()
        assert field.hits == (11 * C if length == near else 0)
    assert field.store.stats()["evictions"] == 0


def test_a_point_without_its_tokens_is_refused() -> None:
    """Guards: a state made up where neither the version nor the tokens before it are there."""
    field = Field()
    owner = field.open("a", prompt(2 * C))
    old = owner.state.version
    root = field.store.open_root("a", old)
    field.store.expire(old.id)
    assert field.store.snapshots.at(old.id, "a") is old
    field.close(owner)
    with pytest.raises(UnknownState, match=root.hex()):
        field.store.match(root, [1], ModeSpans(1), 1)
    with pytest.raises(RollbackBeyondRetention, match="not retained"):
        field.store.snapshots.at(old.id, "a")


@pytest.mark.parametrize(
    "options, fold_pages, bases, named",
    [
        ({"fold_rows": 0}, 0, 8, ["--ttt-retained-versions=4", "--ttt-fold-rows=0"]),
        ({}, 5, 8, ["--ttt-retained-versions=4", "--ttt-fold-rows", "5"]),
        ({"max_bases": 1}, 2, 1, ["--ttt-retained-versions=4", "--ttt-max-bases", "1"]),
    ],
    ids=["no folding", "fold too long", "no second base"],
)
def test_impossible_retention_is_refused_at_start(
    options: dict[str, Any], fold_pages: int, bases: int, named: list[str]
) -> None:
    """Guards: a limit that is accepted and cannot be kept."""
    given = TTTOptions(retained_versions=4, **options)
    with pytest.raises(ValueError) as refusal:
        retained_window(given, fold_pages, bases)
    for part in named:
        assert part in str(refusal.value)
    assert retained_window(TTTOptions(), fold_pages, bases) is None


def test_the_runtime_refuses_impossible_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the check left out where the server starts."""
    from sgl_rwttt.srt_ext.runtime import TTTRuntime

    monkeypatch.delenv("RWTTT_OPTIONS", raising=False)
    TTTOptions(memory_mb=1, retained_versions=4, fold_rows=0).publish()
    with pytest.raises(ValueError, match="--ttt-retained-versions=4"):
        TTTRuntime(Rig(chunk=C).config, "f", torch.device("cpu"))


# refusals


class Controller:
    """A session controller: open sessions, and those that have timed out."""

    def __init__(self, *names: str) -> None:
        self.sessions = dict.fromkeys(names)
        self.expired: list[str] = []

    def maybe_reap(self, now: float, interval: float) -> None:
        assert interval == 0.0
        for name in self.expired:
            del self.sessions[name]
        self.expired = []


def test_owners_at_the_limit_are_refused_until_one_goes() -> None:
    """Guards: `--ttt-max-owners` ignored, or a place held by an owner that timed out."""
    options, controller = TTTOptions(max_owners=2), Controller("a")
    check_place(options, controller)
    check_place(TTTOptions(), Controller(*"abcdef"))
    controller.sessions["b"] = None
    with pytest.raises(StateCapacity, match=r"2 owners are open.*--ttt-max-owners") as refusal:
        check_place(options, controller)
    assert refusal.value.http_status == 507
    controller.expired = ["a"]
    check_place(options, controller)
    assert list(controller.sessions) == ["b"]


def test_branches_and_roots_of_one_owner_are_bounded() -> None:
    """Guards: an owner that makes the server keep requests or roots without end."""
    session = SimpleNamespace(session_id="a", req_nodes=range(limits.MAX_BRANCHES - 1))
    check_branches(session)
    session.req_nodes = range(limits.MAX_BRANCHES)
    with pytest.raises(StateCapacity, match=rf"{limits.MAX_BRANCHES}.*/ttt/drop"):
        check_branches(session)
    check_roots(limits.MAX_ROOTS - 1, "a")
    with pytest.raises(StateCapacity, match=rf"{limits.MAX_ROOTS}.*/ttt/release_root"):
        check_roots(limits.MAX_ROOTS, "a")


def test_a_pool_at_its_limit_names_its_flag() -> None:
    """Guards: a refusal that leaves open what was exhausted and what to raise."""
    pool = SlotPool(4, "delta page", "--ttt-max-pages")
    for _ in range(3):
        pool.alloc()
    with pytest.raises(StateCapacity, match=r"all 3 slots of the delta page pool.*--ttt-max-pages"):
        pool.alloc()
    assert (pool.available, pool.live, pool.reserved) == (0, 3, 1)


def test_a_full_pool_refuses_and_returns_to_its_start() -> None:
    """Guards: a refusal at the limit that keeps a page, a branch or a reference."""
    field = Field(pages=7, bases=1)
    start = field.ledger
    owners = [field.open(name, prompt(2 * C + 1, seed=i)) for i, name in enumerate("ab")]
    full = field.ledger
    assert full[0] == 0
    state = field.store.create(
        "c", "b", field.store.match(field.root, [], ModeSpans(), 0), field.root, [], ModeSpans()
    )
    with pytest.raises(StateCapacity, match="pages"):
        field.store.begin_write(state, [1], Effect.WRITE, 0)
    assert field.ledger == full
    for owner in owners:
        owner.check()
        field.close(owner)
    field.store.release(state)
    field.store.flush()
    assert field.ledger == start
