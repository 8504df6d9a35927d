"""Expired versions: gone as soon as nothing needs them, and never before."""

import pytest

from sgl_rwttt.core import ContextChain, UnknownState
from sgl_rwttt.core.retention import RetentionWindow

from .fakes import Lab, W, writes

C = 2


def grown(lab: Lab, versions: int, owner: str = "a", branch: str = "x"):
    """A live branch with so many versions, its items, and the version ids, oldest first."""
    state, items = lab.create(owner, branch), []
    lab.append(state, items, writes(*range(versions * C)), split=1)
    return state, items, ids_of(lab, items)


def ids_of(lab: Lab, items) -> list[bytes]:
    chain = ContextChain(lab.root.id, lab.chunk)
    for token, mode in items:
        chain.extend([token], mode)
    return [chain.version_id(i) for i in range(1, chain.count)]


def retained(lab: Lab, ids) -> list[bool]:
    lab.store.check_integrity()
    return [version_id in lab.store._index.versions for version_id in ids]


@pytest.mark.parametrize("size, fold_pages", [(1, 1), (1, 3), (4, 3), (6, 2)])
def test_a_thousand_commits_keep_a_window(size: int, fold_pages: int) -> None:
    """Guards: a lineage that keeps more than its K versions, or drops one of the newest."""
    lab = Lab(pages=64, bases=16, chunk=C, fold_pages=fold_pages)
    state = lab.create("a", "x")
    window = RetentionWindow(lab.store, size, ContextChain(lab.root.id, C), 0)
    numbers: list[bytes] = []
    for token in range(1000 * C):
        candidate = lab.store.begin_write(state, [token], W, 0)
        for block in candidate.blocks:
            candidate.mark_written(block.page)
        passed = lab.store.commit(candidate)
        window.passed(passed)
        numbers += [version.id for version in passed]
        assert lab.store.stats()["versions"] <= 1 + size + fold_pages - 1
        assert set(numbers[-size:]) <= set(lab.store._index.versions)
    lab.store.check_integrity()
    assert len(numbers) == 1000
    assert lab.store.stats()["evictions"] == 0


def test_ancestors_stay_until_their_children_go() -> None:
    """Guards: a page freed under a version that reads it."""
    lab = Lab(chunk=C)
    state, items, ids = grown(lab, 4)
    for version_id in ids[:3]:
        lab.store.expire(version_id)
    assert all(retained(lab, ids))
    lab.check(state, items)
    lab.store.release(state)
    assert all(retained(lab, ids))
    lab.store.expire(ids[3])
    assert not any(retained(lab, ids))
    assert lab.pages.live == 0


@pytest.mark.parametrize("holder", ["branch", "pin", "root", "tail pin"])
def test_a_holder_keeps_an_expired_version(holder: str) -> None:
    """Guards: a pin, a root or another branch that loses what it holds."""
    lab = Lab(chunk=C)
    state, items, ids = grown(lab, 2)
    if holder == "tail pin":
        lab.append(state, items, writes(7))
    if "pin" in holder:
        lab.store.pin("a", "here", state)
    if holder == "root":
        root = lab.store.open_root("a", state.version)
    if holder != "branch":
        lab.store.release(state, keep_tail=False)
    lab.store.expire(ids[1])
    lab.store.expire(ids[0])
    assert all(retained(lab, ids))
    if "pin" in holder:
        assert lab.match(lab.root, items).depth == len(items)
        lab.store.unpin("a", "here")
    elif holder == "root":
        lab.store.close_root("a", root)
    else:
        lab.store.release(state)
    assert not any(retained(lab, ids))
    assert lab.pages.live == 0


def test_going_back_further_recomputes() -> None:
    """Guards: an error where a shallower hit and a recompute would do."""
    lab = Lab(chunk=C)
    state, items, ids = grown(lab, 4)
    lab.store.release(state)
    for version_id in reversed(ids):
        lab.store.expire(version_id)
    match = lab.match(lab.root, items)
    assert match.depth == 0
    again = lab.create("a", "y", items)
    lab.append(again, kept := [], items)
    lab.check(again, kept)


@pytest.mark.parametrize("how", ["create", "adopt"])
def test_who_goes_on_from_an_expired_version_renews_it(how: str) -> None:
    """Guards: a lineage whose newest version vanishes at its first pause."""
    lab = Lab(chunk=C)
    state, items, ids = grown(lab, 3)
    lab.store.expire(ids[1])
    if how == "create":
        other = lab.create("b", "y", items[: 2 * C])
    else:
        other = lab.create("b", "y", items[:C])
        lab.append(other, list(items[:C]), items[C : 2 * C], split=1)
    assert other.version.id == ids[1]
    lab.store.release(other)
    lab.store.release(state)
    lab.store.expire(ids[2])
    assert retained(lab, ids) == [True, True, False]


def test_an_expired_version_keeps_no_tail() -> None:
    """Guards: retained tails that keep a version of theirs for ever."""
    lab = Lab(chunk=C)
    state, items, ids = grown(lab, 1)
    lab.append(state, items, writes(7))
    lab.store.release(state)
    assert lab.store.stats()["tails"] == 1
    lab.store.expire(ids[0])
    assert retained(lab, ids) == [False]


def test_long_chains_go_without_recursion() -> None:
    """Guards: RecursionError in a chain longer than Python's stack."""
    lab = Lab(pages=1400, chunk=1)
    state = lab.create("a", "x")
    candidate = lab.begin(state, [], writes(*range(1200)))
    for block in candidate.blocks:
        candidate.mark_written(block.page)
    versions = lab.store.commit(candidate)
    lab.store.release(state)
    for version in versions:
        lab.store.expire(version.id)
    assert lab.pages.live == 0
    lab.store.check_integrity()


def test_unknown_ids_are_ignored() -> None:
    """Guards: an expiry that meets an evicted version and raises."""
    lab = Lab(chunk=C)
    lab.store.expire(b"x" * 16)
    lab.store.expire(lab.root.id)
    assert lab.match(lab.root, writes(1)).depth == 0


def test_closed_roots_leave_nothing() -> None:
    """Guards: an index that grows with every context reset, which takes no slot to be evicted."""
    lab = Lab(chunk=C)
    state = lab.create("a", "x")
    version = state.version
    for _ in range(50):
        root = lab.store.open_root("a", version)
        version = lab.store.root("a", root)
    assert lab.store.stats()["versions"] == 51
    assert lab.store.release_owner("a") == 50
    assert lab.store.stats()["versions"] == 1
    with pytest.raises(UnknownState):
        lab.store.match(root, [], None, 0)
    again = lab.store.open_root("b", lab.store.root("b", lab.root.id))
    assert lab.store.root("b", again).number == 0
    lab.store.check_integrity()
