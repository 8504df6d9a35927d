"""A symbolic payload for the store, and an oracle that replays token lists.

A row is the hash of everything its owner consumed up to it. A block's V is the tuple of its
rows, a state is the tuple of its blocks. Freed pages hold POISON, and reading it fails.
"""

import copy
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby

from sgl_rwttt.core import (
    BlockPart,
    Candidate,
    ContextChain,
    Effect,
    Match,
    ModeSpans,
    OwnerState,
    SlotPool,
    TTTStateStore,
    root_id,
)

POISON = "POISON"
Item = tuple[int, Effect]
C = 4
LENGTHS = [0, 1, C - 1, C, C + 1, 2 * C - 1, 2 * C, 2 * C + 1]
R, W = Effect.READ, Effect.WRITE


@dataclass
class Origin:
    """A root as the oracle knows it."""

    id: bytes
    number: int = 0
    blocks: tuple = ()


@dataclass
class Replay:
    """What an owner that ran alone would hold."""

    blocks: list = field(default_factory=list)
    rows: list = field(default_factory=list)


def mark(*parts: object) -> int:
    """A number that stands for its parts, the same in every process."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest(), "little")


def replay(origin: Origin, items: list[Item], chunk: int) -> Replay:
    """One owner alone, one token at a time."""
    out, symbol = Replay(list(origin.blocks)), mark(origin.id, origin.blocks)
    for token, mode in items:
        symbol = mark(symbol, token, mode is W)
        if mode is W:
            out.rows.append(symbol)
        if len(out.rows) == chunk:
            out.blocks.append(tuple(out.rows))
            out.rows = []
    return out


def symbols(origin: Origin, items: list[Item]) -> list[int]:
    """The row content of every token."""
    symbol, out = mark(origin.id, origin.blocks), []
    for token, mode in items:
        symbol = mark(symbol, token, mode is W)
        out.append(symbol)
    return out


def spans_of(items: list[Item]) -> ModeSpans:
    spans = ModeSpans()
    for mode, group in groupby(mode for _, mode in items):
        spans.append(len(list(group)), mode)
    return spans


def tokens_of(items: list[Item]) -> list[int]:
    return [token for token, _ in items]


class PoisonedPool(SlotPool):
    """Fills a slot with POISON when it is freed."""

    def __init__(self, total: int, name: str, content: dict, blank) -> None:
        super().__init__(total, name, f"--{name}")
        self.content, self.blank = content, blank
        for slot in range(total):
            content[slot] = blank()

    def free(self, slot: int) -> None:
        super().free(slot)
        self.content[slot] = self.blank()


class Lab:
    """A store over symbolic pages, with the moves that a server makes."""

    evidence = "rows"

    def __init__(self, pages=32, bases=3, chunk=4, fold_pages=0) -> None:
        self.chunk = chunk
        self.h: dict[int, list] = {}
        self.v: dict[int, list] = {}
        self.d: dict[int, object] = {}
        self.pages = PoisonedPool(pages, "pages", self.h, lambda: [POISON] * chunk)
        for page in self.h:
            self.v[page] = [POISON] * chunk
        self.bases = PoisonedPool(bases, "bases", self.d, lambda: POISON)
        self.root = Origin(root_id("model", "rule"))
        self.copy_fails = False
        self.store = TTTStateStore(
            self.pages, self.bases, chunk, fold_pages, self.root.id, self.copy_rows, self.evidence
        )

    def learnt(self, blocks) -> list:
        """Those of a replay's blocks that the state shows."""
        return list(blocks)

    # payload

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        if self.copy_fails:
            raise RuntimeError("copy failed")
        assert POISON not in self.h[source][:rows], "copied a poisoned row"
        self.h[target][:rows] = self.h[source][:rows]
        self.v[target][:rows] = self.v[source][:rows]

    def value(self, base: int | None, pages: tuple[int, ...]) -> list:
        """The state read through a base and pages."""
        blocks = list(self.d[base]) if base is not None else []
        for page in pages:
            block = self.v[page][0]
            assert isinstance(block, tuple) and block == tuple(self.h[page]), f"page {page} open"
            assert POISON not in block
            blocks.append(block)
        assert POISON not in blocks
        return blocks

    def content(self, page: int) -> tuple[list, list]:
        """A copy of what a page holds."""
        return list(self.h[page]), list(self.v[page])

    def put(self, page: int, content: tuple[list, list]) -> None:
        """Fill a page with a copy."""
        self.h[page][:], self.v[page][:] = content

    def tail_rows(self, page: int, rows: int) -> list:
        assert self.h[page][:rows] == self.v[page][:rows], "the targets of the tail are gone"
        return self.h[page][:rows]

    # the executor

    def run(self, candidate: Candidate, origin: Origin, items: list[Item], skip=()) -> None:
        """The forward of one segment; `items` is the context with the new tokens."""
        segment = candidate.segment
        done = len(items) - segment.count
        rows = symbols(origin, items)
        at = 0
        for part in segment.parts:
            assert part.offset == at and part.count > 0
            at += part.count
            start = done + part.offset
            alone = replay(origin, items[:start], self.chunk)
            seen = self.learnt(alone.blocks)
            assert self.value(part.base, part.pages) == seen, "a part reads another state"
            modes = {mode for _, mode in items[start : start + part.count]}
            assert modes == {W if part.writes else R}
            if part.writes:
                self._write(candidate, part, alone, rows[start : start + part.count], skip)
            assert part.deferred == (part.completes and at == segment.count)
        assert at == segment.count

    def _write(self, candidate: Candidate, part: BlockPart, alone: Replay, rows, skip) -> None:
        page, end = part.page, part.row + part.count
        assert self.tail_rows(page, part.row) == alone.rows, "the carried tail is not ours"
        self.h[page][part.row : end] = rows
        self.v[page][part.row : end] = rows
        assert part.completes == (end == self.chunk)
        if not part.completes or page in skip:
            return
        block = tuple(self.h[page])
        assert POISON not in block
        self.v[page] = [block] * self.chunk
        if part.fold_base is not None:
            self.d[part.fold_base] = tuple(self.value(*part.fold_from))
        candidate.mark_written(page)

    # moves

    def match(self, origin: Origin, items: list[Item], limit=None, chain=None) -> Match:
        limit = len(items) if limit is None else limit
        return self.store.match(origin.id, tokens_of(items), spans_of(items), limit, chain)

    def create(self, owner, branch, items=(), origin=None, limit=None) -> OwnerState:
        origin, items = origin or self.root, list(items)
        match = self.match(origin, items, limit)
        return self.store.create(owner, branch, match, origin.id, tokens_of(items), spans_of(items))

    def begin(self, state: OwnerState, items: list[Item], new: list[Item]) -> Candidate:
        everything = list(items) + list(new)
        return self.store.begin_write(state, tokens_of(new), spans_of(everything), 0)

    def append(self, state: OwnerState, items: list[Item], new, origin=None, split=None):
        """Run and commit `new`, `split` tokens per forward; extends `items`."""
        new = list(new)
        step = split or max(1, len(new))
        for i in range(0, len(new), step):
            part = new[i : i + step]
            candidate = self.begin(state, items, part)
            items.extend(part)
            self.run(candidate, origin or self.root, items)
            self.store.commit(candidate)

    def deepest(self, origin: Origin, items: list[Item], limit: int) -> tuple[int, int]:
        """The contract of match, tried at every depth from the deepest."""
        versions = self.store._index.versions
        chain = ContextChain(origin.id, self.chunk)
        chain.sync(tokens_of(items), spans_of(items), limit)
        for n in range(limit, -1, -1):
            clock = chain.clock_at(n)
            version = versions.get(clock.version_id)
            if version is None:
                continue
            key = clock.codes if self.evidence == "rows" else b""
            while key and not key[-8] & 1:
                key = key[:-8]
            if not key or any(memo.key.startswith(key) for memo in version.memos):
                return n, clock.rows
        raise AssertionError("the root is always retained")

    def check(self, state: OwnerState, items: list[Item], origin=None) -> None:
        """A live branch equals its replay, field by field."""
        origin = origin or self.root
        alone = replay(origin, items, self.chunk)
        view = self.store.view(state)
        assert self.value(view.base, view.pages) == self.learnt(alone.blocks)
        assert view.rows == len(alone.rows)
        assert view.position == len(items) == state.clock.position
        assert view.number == origin.number + len(alone.blocks) - len(origin.blocks)
        self.check_tail(view, alone.rows)
        chain = ContextChain(origin.id, self.chunk)
        chain.sync(tokens_of(items), spans_of(items))
        assert view.state_id == chain.state_id_at(len(items))

    def check_tail(self, view, rows: list) -> None:
        if rows:
            assert self.tail_rows(view.tail_page, view.rows) == rows

    def ledger(self) -> tuple[int, int, int]:
        """(free, live, reserved) pages after the audit."""
        self.store.check_integrity()
        return self.pages.available, self.pages.live, self.pages.reserved


class Shared:
    """Content of a page whose update changed nothing: its readers see other pages."""

    def __init__(self, pages: tuple[int, ...]) -> None:
        self.pages = pages


class SlotLab(Lab):
    """A store whose evidence is token ids: a page is the whole tuple of the blocks learnt.

    Two of three blocks are learnt, the others leave the state as it was.
    """

    evidence = "tokens"

    def __init__(self, pages=32, chunk=4) -> None:
        super().__init__(pages, 1, chunk, 0)

    def copy_rows(self, source: int, target: int, rows: int) -> None:
        raise AssertionError("there is nothing to copy")

    def learnt(self, blocks) -> list:
        return [block for block in blocks if sum(block) % 3]

    def value(self, base: int | None, pages: tuple[int, ...]) -> list:
        assert base is None and len(pages) <= 1
        content = self.h[pages[0]] if pages else ()
        if isinstance(content, Shared):
            return self.value(None, content.pages)
        assert isinstance(content, tuple), f"page {pages} is free or was not written"
        return list(content)

    def content(self, page: int):
        return self.h[page]

    def put(self, page: int, content) -> None:
        self.h[page] = content

    def run(self, candidate: Candidate, origin: Origin, items: list[Item], skip=()) -> None:
        segment, tokens = candidate.segment, [token for token, mode in items if mode is W]
        done = sum(mode is W for _, mode in items[: len(items) - segment.count]) // self.chunk
        for i, evidence in enumerate(segment.evidence):
            first = (done + i) * self.chunk
            assert list(evidence) == tokens[first : first + self.chunk]
        assert len(segment.evidence) == len(segment.blocks)
        super().run(candidate, origin, items, skip)

    def _write(self, candidate: Candidate, part: BlockPart, alone: Replay, rows, skip) -> None:
        block = (*alone.rows, *rows)
        assert part.completes == (len(block) == self.chunk) == (part.page != 0)
        if not part.completes or part.page in skip:
            return
        if self.learnt([block]):
            self.h[part.page] = (*self.value(None, part.pages), block)
        else:
            self.h[part.page] = Shared(part.pages)
        candidate.mark_written(part.page, changed=bool(self.learnt([block])))

    def check_tail(self, view, rows: list) -> None:
        assert view.tail_page is None


def writes(*tokens: int) -> list[Item]:
    return [(token, W) for token in tokens]


def reads(*tokens: int) -> list[Item]:
    return [(token, R) for token in tokens]


def snapshot(lab: Lab, version) -> tuple:
    """What a version holds: identity, slots and content."""
    pages = {page: (list(lab.h[page]), list(lab.v[page])) for page in version.pages}
    return version.id, version.number, version.base, version.pages, copy.deepcopy(pages)


def state_fields(state) -> tuple:
    tail = (state.tail.page, state.tail.rows, state.tail.refs) if state.tail else None
    clock = state.clock
    return (
        state.version,
        state.version.refs,
        tail,
        clock.position,
        clock.items,
        clock.state_id,
        state.failed,
        state.released,
        state.candidate,
    )


def mixed(n: int, start: int = 0) -> list:
    """n tokens with a READ run in every fifth place."""
    return [(start + i, R if i % 5 == 3 else W) for i in range(n)]
