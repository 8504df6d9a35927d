"""Points in mid-context that leave one store and enter another; the ledger after every step."""

import pytest

from sgl_rwttt.core import (
    ForeignOwner,
    IncompatibleSnapshot,
    RollbackBeyondRetention,
    StateCapacity,
    UnknownState,
    faults,
)
from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.contexts import Point, PointState, check_point, extends_root
from sgl_rwttt.core.snapshots import Link

from .fakes import C, Lab, Origin, mixed, replay, spans_of, tokens_of, writes


class Saved:
    """What a file of a point holds."""

    def __init__(self, lab: Lab, owner: str, origin: Origin, items: list) -> None:
        chain = ContextChain(origin.id, lab.chunk, origin.number)
        chain.sync(tokens_of(items), spans_of(items))
        state: PointState = lab.store.contexts.at(owner, chain, len(items))
        check_point(state.point, {lab.root.id})
        self.point, self.items, self.origin = state.point, items, origin
        start = lab.store.root(owner, origin.id)
        self.root = self.payload(lab, start)
        self.head = self.payload(lab, state.version)
        self.tail = lab.tail_rows(state.tail.tail.page, state.rows) if state.tail else []

    def payload(self, lab: Lab, version):
        base = None if version.base is None else lab.d[version.base]
        return base, [(list(lab.h[page]), list(lab.v[page])) for page in version.pages]

    def resume(self, lab: Lab, owner: str = "new", pin: str = "p"):
        def put(payload, base, pages):
            if base is not None:
                lab.d[base] = payload[0]
            for page, (h, v) in zip(pages[::-1], payload[1][::-1], strict=False):
                lab.h[page][:], lab.v[page][:] = h, v

        def fill(base, pages, tail):
            put(self.head, base, pages)
            if tail is not None:
                lab.h[tail][: len(self.tail)] = lab.v[tail][: len(self.tail)] = self.tail

        resumed = lab.store.contexts.resume(
            owner, pin, self.point, lambda base, pages: put(self.root, base, pages), fill
        )
        lab.store.check_integrity()
        return resumed


def saved(lab: Lab, before: int, inside: int, owner: str = "a") -> Saved:
    """A point `inside` tokens into a context that was cleared after `before` tokens."""
    origin = lab.root
    if before:
        first = lab.create(owner, "first")
        items: list = []
        lab.append(first, items, mixed(before))
        blocks = tuple(replay(lab.root, items, lab.chunk).blocks)
        origin = Origin(lab.store.open_root(owner, first.version), first.version.number, blocks)
        lab.store.release(first)
    second, items = lab.create(owner, "second", [], origin), []
    lab.append(second, items, mixed(inside, 100), origin)
    lab.store.release(second)
    return Saved(lab, owner, origin, items)


@pytest.mark.parametrize("fold_pages", [0, 1, 3])
@pytest.mark.parametrize("before", [0, 7, 23])
@pytest.mark.parametrize("inside", [1, C - 1, C, C + 1, 5 * C, 8 * C + 3])
def test_goes_on_in_another_store(fold_pages: int, before: int, inside: int) -> None:
    """Guards: a resumed point that lacks the tail, the root or a version, and slots that leak."""
    old = Lab(pages=60, bases=20, fold_pages=fold_pages)
    file = saved(old, before, inside)
    new = Lab(pages=60, bases=20, fold_pages=fold_pages)
    empty = new.ledger()
    resumed = file.resume(new)
    assert resumed.tail == bool(file.tail)
    branch = new.create("new", "b", file.items, file.origin)
    assert branch.clock.position == inside
    new.check(branch, file.items, file.origin)
    items = list(file.items)
    for part in (mixed(3), mixed(1), mixed(25, 50)):
        new.append(branch, items, part, file.origin)
        new.check(branch, items, file.origin)
    again = new.create("new", "again", file.items[:1], file.origin)  # from the root, if need be
    start = again.clock.position
    new.append(again, file.items[:start], file.items[start:][:5], file.origin)
    for state in (branch, again):
        new.store.release(state)
    new.store.release_owner("new")
    new.store.flush()
    assert new.ledger() == empty
    assert new.bases.live == 0


def test_the_pin_keeps_the_point() -> None:
    """Guards: a point that is evicted before its first use; a pin that stays when it is lifted."""
    file, new = saved(Lab(pages=60), 9, 12), Lab(pages=20)
    assert file.resume(new).tail
    new.store.flush()
    assert new.match(file.origin, file.items).depth == len(file.items)
    new.store.unpin("new", "p")
    new.store.close_root("new", file.origin.id)
    new.store.flush()
    assert new.ledger()[1] == 0


def test_what_is_retained_is_not_filled() -> None:
    """Guards: a second copy of a state, in the store that saved it or has a part of it."""
    lab = Lab(pages=60)
    file, live = saved(lab, 9, 10), lab.pages.live
    resumed = file.resume(lab, "other")
    assert (resumed.pages, resumed.tail) == (0, False)
    assert lab.pages.live == live
    longer = saved(Lab(pages=60), 9, 10 + 2 * C)
    resumed = longer.resume(lab, "third")
    assert (resumed.pages, resumed.tail) == (2, True)
    assert lab.pages.live == live + 2


@pytest.mark.parametrize("point", ["publish.allocated", "publish.copied"])
@pytest.mark.parametrize("skip", [0, 1], ids=["root", "head"])
def test_failure_before_publication_changes_nothing(point: str, skip: int) -> None:
    """Guards: a root that stays open, or slots that leak, when the rest of the point fails.

    Seen to fail: without `close_root` in `resume`.
    """
    file, new = saved(Lab(pages=60, bases=9), 9, 10), Lab(pages=60, bases=9)
    new.append(new.create("x", "m"), [], writes(*range(9)))
    before = (new.ledger(), dict(new.store._index.versions), new.store.stats()["roots"])
    fault = faults.raising(RuntimeError("gone"))
    with faults.armed(point, fault, skip=skip) as armed, pytest.raises(RuntimeError):
        file.resume(new)
    assert armed.hits == 1
    assert (new.ledger(), dict(new.store._index.versions), new.store.stats()["roots"]) == before
    file.resume(new)


def test_what_cannot_fit_is_refused_and_evicts_nothing() -> None:
    """Guards: everybody's memos lost for a point that never had a chance."""
    file, new = saved(Lab(pages=60), 9, 6 * C + 1), Lab(pages=6)
    memo = new.create("x", "m")
    new.append(memo, [], writes(1, 2, 3, 4, 5))
    new.store.release(memo)
    before = new.ledger()
    with pytest.raises(StateCapacity, match="--pages"):
        file.resume(new)
    assert new.ledger() == before


def test_points_that_can_be_saved() -> None:
    """Guards: another owner's context in a file, or a state that is silently not all there."""
    lab = Lab(pages=60)
    at, context = lab.store.contexts.at, saved(lab, 9, 12).point.context
    assert (at("a", context, 11).rows, at("a", context, 12).rows) == (1, 2)
    with pytest.raises(ForeignOwner):
        at("b", context, 3)
    with pytest.raises(UnknownState):
        at("a", ContextChain(b"x" * 16, C), 0)
    lab.store.flush()
    with pytest.raises(RollbackBeyondRetention, match=r"of 12 tokens .* up to 0"):
        at("a", context, 12)


def changed(point: Point, **fields) -> Point:
    return point._replace(**fields)


def _other_tokens(point: Point) -> Point:
    chain = ContextChain(point.context.root, C, point.context.number)
    chain.sync(list(range(200, 200 + point.position)), spans_of(mixed(point.position)))
    return changed(point, context=chain)


BROKEN = {
    "other tokens": _other_tokens,
    "a version too few": lambda p: changed(p, head=p.head[:-1]),
    "a version too many": lambda p: changed(p, position=p.position - C),
    "another root": lambda p: changed(p, root=p.root[:1]),
    "a root that is a version": lambda p: changed(p, root=p.root[:-1]),
    "a head without base": lambda p: changed(p, head=(Link("base", 0, p.head[0].id), *p.head[1:])),
    "another number": lambda p: changed(
        p, context=ContextChain(p.context.root, C, p.context.number + 1)
    ),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("fold_pages", [0, 2])
def test_chains_that_do_not_lead_to_the_tokens(change, fold_pages: int) -> None:
    """Guards: weights of one text under the tokens of another."""
    lab = Lab(pages=60, bases=20, fold_pages=fold_pages)
    point = saved(lab, 9, 5 * C + 1).point
    assert extends_root(point) == (fold_pages == 0)
    with pytest.raises(IncompatibleSnapshot, match=r"^chain: "):
        check_point(change(point), {lab.root.id})
