"""Random walks over the whole life of owners, the audit and an oracle after every operation."""

import random
from collections import Counter
from itertools import count

import pytest

from sgl_rwttt.core import (
    BranchBusy,
    Candidate,
    ContextChain,
    OwnerState,
    StateCapacity,
    cleared_root_id,
)

from .fakes import Item, Lab, Origin, R, SlotLab, W, replay, spans_of, tokens_of

TOKENS = (1, 1, 1, 2)


class Branch:
    """The oracle's side of a live branch."""

    def __init__(self, state: OwnerState, origin: Origin, items: list[Item]) -> None:
        self.state, self.origin, self.items = state, origin, items
        self.candidate: Candidate | None = None
        self.pending: list[Item] = []


class Walk:
    """Random operations; every one is followed by `verify`."""

    def __init__(self, seed: int, lab: Lab) -> None:
        self.random = random.Random(seed)
        self.lab = lab
        self.branches: list[Branch] = []
        self.origins = [self.lab.root]
        self.held_roots: dict[str, set[bytes]] = {}
        self.pins: dict[tuple[str, str], tuple] = {}
        self.history: list[tuple[Origin, list[Item]]] = [(self.lab.root, [])]
        self.expected = {self.lab.root.id: ()}
        self.names = count()
        self.done: Counter[str] = Counter()

    # choices

    def new_items(self, most: int) -> list[Item]:
        mode, items = self.random.choice((R, W, W, W)), []
        for _ in range(self.random.randint(1, most)):
            if self.random.random() < 0.1:
                mode = R if mode is W else W
            items.append((self.random.choice(TOKENS), mode))
        return items

    def owner(self) -> str:
        return self.random.choice("abc")

    def branch(self, busy: bool = False) -> Branch | None:
        ready = [b for b in self.branches if (b.candidate is not None) == busy]
        return self.random.choice(ready) if ready else None

    # operations

    def create(self) -> None:
        origin, past = self.random.choice(self.history[-12:])
        if origin not in self.origins:
            return
        kept = self.random.choice((len(past), self.random.randint(0, len(past))))
        items = past[:kept] + self.new_items(3)
        chain = ContextChain(origin.id, self.lab.chunk) if self.random.random() < 0.5 else None
        limit = self.random.choice((len(items), self.random.randint(0, len(items))))
        match = self.lab.match(origin, items, limit, chain)
        assert (match.depth, match.rows) == self.lab.deepest(origin, items, limit)
        if self.random.random() < 0.1:
            return
        self.lab.copy_fails = self.random.random() < 0.1
        try:
            state = self.lab.store.create(
                self.owner(),
                f"b{next(self.names)}",
                match,
                origin.id,
                tokens_of(items),
                spans_of(items),
            )
        except (StateCapacity, RuntimeError):
            self.done["create refused"] += 1
            return
        finally:
            self.lab.copy_fails = False
        self.done["resumed"] += match.depth > 0
        self.done["tail resumed"] += match.rows > 0
        self.branches.append(Branch(state, origin, items[: match.depth]))

    def begin(self) -> None:
        branch = self.branch()
        if branch is None:
            return
        most = self.random.choice((1, self.lab.chunk, 3 * self.lab.chunk + 2))
        new = self.new_items(most)
        self.lab.copy_fails = self.random.random() < 0.1
        try:
            branch.candidate = self.lab.begin(branch.state, branch.items, new)
            branch.pending = new
        except (StateCapacity, RuntimeError):
            self.done["begin refused"] += 1
        finally:
            self.lab.copy_fails = False

    def commit(self) -> None:
        branch = self.branch(busy=True)
        if branch is None:
            return
        everything = branch.items + branch.pending
        self.lab.run(branch.candidate, branch.origin, everything)
        versions = self.lab.store.commit(branch.candidate)
        branch.items, branch.candidate = everything, None
        self.history.append((branch.origin, everything))
        blocks = replay(branch.origin, everything, self.lab.chunk).blocks
        for back, version in enumerate(reversed(versions)):
            self.expected[version.id] = tuple(blocks[: len(blocks) - back])
        self.done["versions"] += len(versions)

    def drop(self) -> None:
        branch = self.branch(busy=True)
        if branch is None:
            return
        if self.random.random() < 0.5:
            skip = {block.page for block in branch.candidate.blocks if block.in_place}
            everything = branch.items + branch.pending
            self.lab.run(branch.candidate, branch.origin, everything, skip)
        self.lab.store.drop(branch.candidate)
        self.lab.store.drop(branch.candidate)
        branch.candidate = None

    def release(self) -> None:
        if self.branches:
            branch = self.branches.pop(self.random.randrange(len(self.branches)))
            self.lab.store.release(branch.state, keep_tail=self.random.random() < 0.7)

    def fork(self) -> None:
        branch = self.branch()
        if branch is None:
            return
        try:
            twin = self.lab.store.fork(branch.state, self.owner(), f"b{next(self.names)}")
        except StateCapacity:
            return
        self.branches.append(Branch(twin, branch.origin, list(branch.items)))

    def pin(self) -> None:
        branch = self.branch()
        if branch is None:
            return
        owner, name = branch.state.owner, self.random.choice("xy")
        self.lab.store.pin(owner, name, branch.state)
        self.pins[owner, name] = (branch.origin, list(branch.items))

    def unpin(self) -> None:
        if self.pins:
            owner, name = self.random.choice(sorted(self.pins))
            self.lab.store.unpin(owner, name)
            del self.pins[owner, name]

    def open_root(self) -> None:
        branch = self.branch()
        if branch is None or len(self.origins) > 6:
            return
        version, owner = branch.state.version, branch.state.owner
        root = self.lab.store.open_root(owner, version)
        assert root == cleared_root_id(version.id)
        self.held_roots.setdefault(owner, set()).add(root)
        blocks = tuple(replay(branch.origin, branch.items, self.lab.chunk).blocks)
        if all(origin.id != root for origin in self.origins):
            self.origins.append(Origin(root, version.number, blocks))
        self.expected[root] = blocks
        self.history.append((next(o for o in self.origins if o.id == root), []))

    def release_owner(self) -> None:
        owner = self.owner()
        self.lab.store.release_owner(owner)
        self.pins = {key: pin for key, pin in self.pins.items() if key[0] != owner}
        self.held_roots.pop(owner, None)
        kept = {self.lab.root.id}.union(*self.held_roots.values())
        self.origins = [origin for origin in self.origins if origin.id in kept]

    def press(self) -> None:
        wanted = self.random.randint(1, self.lab.pages.total)
        able = self.lab.store.ensure_pages(wanted, self.random.randint(0, 1))
        assert not able or self.lab.pages.available >= wanted

    def expire(self) -> None:
        versions = self.lab.store._index.versions
        self.lab.store.expire(self.random.choice(list(versions)))

    def flush(self) -> None:
        self.lab.store.flush()
        assert self.lab.store.stats()["memos"] == 0

    # after every operation

    def verify(self) -> None:
        self.lab.store.check_integrity()
        for branch in self.branches:
            if branch.candidate is None:
                self.lab.check(branch.state, branch.items, branch.origin)
        for version in self.lab.store._index.versions.values():
            value = tuple(self.lab.value(version.base, version.pages))
            assert value == tuple(self.lab.learnt(self.expected[version.id]))
            for memo in version.memos:
                self.lab.tail_rows(memo.tail.page, memo.rows)
        for origin, items in self.pins.values():
            if origin in self.origins:
                assert self.lab.match(origin, items).depth == len(items)

    def run(self, operations: int) -> None:
        table = {
            self.create: 5,
            self.begin: 14,
            self.commit: 13,
            self.drop: 2,
            self.release: 3,
            self.fork: 1,
            self.pin: 1,
            self.unpin: 1,
            self.open_root: 0.5,
            self.release_owner: 0.4,
            self.press: 0.3,
            self.expire: 3,
            self.flush: 0.1,
        }
        moves = self.random.choices(list(table), list(table.values()), k=operations)
        for move in moves:
            move()
            self.done[move.__name__] += 1
            long = [b for b in self.branches if len(b.items) > 40 and b.candidate is None]
            for branch in long or self.branches[8:]:
                self.branches.remove(branch)
                self.lab.store.release(branch.state)
            self.verify()

    def close(self) -> None:
        while self.branches:
            self.release()
        for owner in "abc":
            self.lab.store.release_owner(owner)
        self.lab.store.flush()
        self.lab.store.check_integrity()
        assert (self.lab.pages.live, self.lab.bases.live) == (0, 0)
        assert self.lab.store.stats()["versions"] == 1


SHAPES = [
    {"pages": 14, "bases": 1, "chunk": 1, "fold_pages": 0},
    {"pages": 20, "bases": 3, "chunk": 2, "fold_pages": 2},
    {"pages": 28, "bases": 2, "chunk": 3, "fold_pages": 1},
    {"pages": 40, "bases": 5, "chunk": 4, "fold_pages": 3},
    {"pages": 200, "bases": 4, "chunk": 2, "fold_pages": 3},
]


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_walk_of_2000_operations(seed):
    """Hit and evict bookkeeping at the extremes (field failure 19), leaks, aliases, stale reads.

    Seen to fail: with every carried page completed in place (an owner's replay differs), with
    the page's count of holders ignored there, without adoption, with a pin that holds nothing.
    """
    walk = Walk(seed, Lab(**SHAPES[seed]))
    walk.run(2000)
    walk.close()
    assert walk.done["versions"] > 50 and walk.done["resumed"] > 20


def test_walk_reaches_every_path():
    """A walk that never folds, adopts, evicts or copies proves nothing."""
    walk = Walk(7, Lab(pages=24, bases=3, chunk=3, fold_pages=2))
    walk.run(2000)
    stats = walk.lab.store.stats()
    counted = ("commits", "adoptions", "folds", "forks", "drops", "copies", "evictions")
    for name in (*counted, "expirations"):
        assert stats[name] > 2, (name, stats)
    for name in ("tail resumed", "create refused", "begin refused"):
        assert walk.done[name] > 2, (name, walk.done)


@pytest.mark.parametrize("shape", [{"pages": 9, "chunk": 2}, {"pages": 60, "chunk": 3}], ids=str)
def test_walk_where_evidence_is_token_ids(shape):
    """The same of versions that are one page each, or share an older one's.

    Seen to fail: with a sharing version that holds no reference on whose page it reads, and with
    one that keeps the page which its candidate took.
    """
    walk = Walk(3, SlotLab(**shape))
    walk.run(2000)
    stats = walk.lab.store.stats()
    assert stats["copies"] == stats["folds"] == stats["tails"] == 0
    for name in ("commits", "adoptions", "forks", "drops", "expirations"):
        assert stats[name] > 2, (name, stats)
    versions = walk.lab.store._index.versions.values()
    assert any(
        v.page is None and v.parent and v.id != cleared_root_id(v.parent.id) for v in versions
    )
    walk.close()
    assert walk.done["versions"] > 50 and walk.done["tail resumed"] > 20


def test_busy_branches_are_refused():
    """Two open writes of one owner would fill one page twice."""
    lab = Lab()
    state = lab.create("a", "main")
    lab.begin(state, [], [(1, W)])
    for call in (
        lambda: lab.begin(state, [], [(2, W)]),
        lambda: lab.store.pin("a", "x", state),
        lambda: lab.store.fork(state, "a", "other"),
        lambda: lab.create("a", "main"),
    ):
        with pytest.raises(BranchBusy):
            call()
        lab.store.check_integrity()
