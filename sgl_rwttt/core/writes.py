"""The write path: planning a candidate, publishing it, or giving back what it took."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sgl_rwttt.core.candidate import Block, BlockWalk, Candidate, Runs
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import (
    InvalidStateRequest,
    OwnerReleased,
    StaleVersion,
    StateCapacity,
    WriteFailed,
)
from sgl_rwttt.core.faults import reach
from sgl_rwttt.core.index import StateIndex
from sgl_rwttt.core.lineage import Boundary, encode
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.segment import DUMMY, BlockPart, Segment
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.versions import Tail, Version, sharing


class Layout(NamedTuple):
    """Pages of one write."""

    completed: int  # blocks that it completes
    left: int  # rows that stay open
    in_place: bool  # the carried page goes on being used
    fresh: int  # pages to allocate, the copy of a carried page included


class WritePath:
    """Candidates of one store. `bases_in_use()` counts the bases that eviction cannot free."""

    def __init__(
        self,
        index: StateIndex,
        chunk: int,
        fold_pages: int,
        copy_rows: Callable[[int, int, int], None],
        bases_in_use: Callable[[], int],
    ) -> None:
        self.chunk = chunk
        self.fold_pages = fold_pages
        self.counters = dict.fromkeys(("commits", "adoptions", "folds", "drops", "copies"), 0)
        self._index = index
        self._copy_rows = copy_rows
        self._bases_in_use = bases_in_use

    def begin(
        self, state: OwnerState, tokens: Sequence[int], modes: ModeSpans | Effect, start_row: int
    ) -> Candidate:
        """See `TTTStateStore.begin_write`; `state` is live and idle."""
        runs = _runs(state, tokens, modes)
        reach("write.begin", owner=state.owner, branch=state.branch)
        writes = sum([len(codes) for codes, mode in runs if mode is Effect.WRITE])
        completed, left, in_place, fresh = self.layout(state, writes, len(tokens))
        self._reserve(state, fresh)
        version = state.version
        candidate = Candidate(state, runs)
        candidate.tail_rows = left
        state.candidate = candidate
        parts: tuple[BlockPart, ...]
        try:
            if completed == 0 and len(runs) == 1:
                parts = (self._single_part(candidate, len(tokens), writes > 0),)
            else:
                parts = self._walk(candidate, in_place, len(tokens))
            reach("publish.allocated", owner=state.owner, branch=state.branch)
        except BaseException:
            self._give_back(candidate)
            raise
        evidence = self._evidence(candidate) if completed else ()
        candidate.segment = Segment(
            start_row, len(tokens), version.base, version.pages, parts, evidence
        )
        return candidate

    def layout(self, state: OwnerState, writes: int, tokens: int) -> "Layout":
        """Where the next `tokens` tokens go, `writes` of them WRITE.

        A carried page is completed in place only by a single token and while nobody else holds
        it: completing replaces its targets, which a drop or another holder would still need.
        """
        completed, left = divmod(state.clock.rows + writes, self.chunk)
        tail = state.tail
        in_place = tail is not None and (completed == 0 or (tokens == 1 and tail.refs == 1))
        return Layout(completed, left, in_place, completed + (left > 0) - in_place)

    def commit(self, candidate: Candidate) -> list[Version]:
        """See `TTTStateStore.commit`."""
        _check_commit(candidate)
        state = candidate.state
        boundaries: list[Boundary] = []
        for codes, mode in candidate.runs:
            boundaries += state.clock.push_codes(codes, mode)
        versions: list[Version] = []
        version = state.version
        for block, boundary in zip(candidate.blocks, boundaries, strict=True):
            version = self._publish(version, block, boundary, block.page in candidate.kept)
            versions.append(version)
        self._advance_tail(candidate)
        if versions:
            self._index.ref(version)
            self._index.unref(state.version)
            state.version = version
        candidate.is_open = False
        state.candidate = None
        self.counters["commits"] += 1
        return versions

    def drop(self, candidate: Candidate) -> None:
        """See `TTTStateStore.drop`."""
        if not candidate.is_open:
            return
        self._give_back(candidate)
        if any(block.in_place and block.page in candidate.written for block in candidate.blocks):
            candidate.state.failed = True
        self.counters["drops"] += 1

    def copied_tail(self, state: OwnerState, page: int, rows: int) -> Tail:
        """A new open page for `state` with the first rows of another page.

        Raises StateCapacity or what `copy_rows` raises, with the page given back.
        """
        self._reserve(state, 1)
        return Tail(self._copied_page(state, page, rows), rows)

    def _copied_page(self, state: OwnerState, source: int, rows: int) -> int:
        pages = state.version.pages
        page = self._index.pages.alloc(pages[-1] if pages else None)
        try:
            reach("publish.allocated", owner=state.owner, branch=state.branch)
            self._copy_rows(source, page, rows)
            reach("publish.copied", owner=state.owner, branch=state.branch)
        except BaseException:
            self._index.pages.free(page)
            raise
        self.counters["copies"] += 1
        return page

    def _reserve(self, state: OwnerState, need: int) -> None:
        pool = self._index.pages
        if need <= pool.available or self._index.ensure(need):
            return
        hint = f"; raise {pool.flag}" if pool.flag else ""
        raise StateCapacity(
            f"{need} more slots of the {pool.name} pool are needed, {pool.available} of "
            f"{pool.total - pool.reserved} can be had{hint}",
            **state.names,
        )

    def _single_part(self, candidate: Candidate, count: int, writes: bool) -> BlockPart:
        """The usual decode step: one part that completes nothing."""
        state = candidate.state
        base, pages = state.version.base, state.version.pages
        if state.tail is not None:
            page = state.tail.page
        elif not writes:
            page = DUMMY
        else:
            page = self._index.pages.alloc(pages[-1] if pages else None)
            candidate.pages.append(page)
            candidate.tail_page = page
        return BlockPart(0, count, writes, page, state.clock.rows, False, False, base, pages)

    def _walk(self, candidate: Candidate, in_place: bool, total: int) -> tuple[BlockPart, ...]:
        """Plan parts in general; a carried page that is completed by many tokens is copied."""
        tail = candidate.state.tail
        walk = BlockWalk(
            candidate, self.chunk, self.fold_pages, self._index.pages.alloc, self._take_base
        )
        if tail is not None and in_place:
            walk.open_page(tail.page, in_place=True)
        elif tail is not None:
            page = self._copied_page(candidate.state, tail.page, tail.rows)
            candidate.pages.append(page)
            walk.open_page(page, in_place=False)
        offset = 0
        for codes, mode in candidate.runs:
            if mode is Effect.READ:
                walk.read(offset, len(codes))
            else:
                walk.write(offset, len(codes), total)
            offset += len(codes)
        candidate.tail_page = None if walk.in_place else walk.page
        return tuple(walk.parts)

    def _evidence(self, candidate: Candidate) -> tuple[tuple[int, ...], ...]:
        """The completed blocks' evidence where it is token ids; rows are in their pages."""
        return ()

    def _take_base(self) -> int | None:
        """A base slot, evicting memos only where that can free one."""
        bases = self._index.bases
        if bases.available:
            return bases.alloc()
        if bases.live > self._bases_in_use() and self._index.ensure(0, 1):
            return bases.alloc()
        return None

    def _publish(self, parent: Version, block: Block, boundary: Boundary, kept: bool) -> Version:
        """Index the version of one completed block, or adopt the one that is retained."""
        index = self._index
        _, version_id, number = boundary
        known = index.versions.get(version_id)
        if known is not None:
            index.pages.free(block.page)
            if block.base is not None:
                index.bases.free(block.base)
            index.touch(known)
            index.renew(known)
            self.counters["adoptions"] += 1
            return known
        if kept:
            index.pages.free(block.page)
            version = sharing(version_id, number, parent)
        elif block.base is not None:
            index.pages.free(block.page)
            version = Version(version_id, number, base=block.base, owns_base=True)
            self.counters["folds"] += 1
        else:
            version = self._version(version_id, number, parent, block.page)
        index.publish(version)
        return version

    def _version(self, version_id: bytes, number: int, parent: Version, page: int) -> Version:
        """The version that reads `parent` and one page more."""
        return Version(version_id, number, parent, page, parent.base, (*parent.pages, page))

    def _advance_tail(self, candidate: Candidate) -> None:
        state, blocks, left = candidate.state, candidate.blocks, candidate.tail_rows
        tail = state.tail
        if tail is not None and not blocks:
            tail.rows = left
            return
        if tail is not None and blocks[0].in_place:
            tail.refs = 0  # its page went to the version
        elif tail is not None:
            self._index.unref_tail(tail)
        page = candidate.tail_page
        state.tail = None if page is None else Tail(page, left)

    def _give_back(self, candidate: Candidate) -> None:
        candidate.is_open = False
        candidate.state.candidate = None
        for page in candidate.pages:
            self._index.pages.free(page)
        for base in candidate.bases:
            self._index.bases.free(base)


def _runs(state: OwnerState, tokens: Sequence[int], modes: ModeSpans | Effect) -> Runs:
    if isinstance(modes, Effect):
        return [(encode(tokens, modes), modes)]
    at = state.clock.position
    if len(modes) < at + len(tokens):
        raise InvalidStateRequest(
            f"modes of {len(modes)} tokens do not cover {at + len(tokens)}", **state.names
        )
    runs = modes.runs(at, at + len(tokens))
    return [(encode(tokens[a - at : b - at], mode), mode) for a, b, mode in runs]


def _check_commit(candidate: Candidate) -> None:
    state = candidate.state
    if state.released:
        raise OwnerReleased("a late commit after release", **state.names)
    if (
        not candidate.is_open
        or state.candidate is not candidate
        or state.generation != candidate.generation
        or state.version is not candidate.version
        or state.clock.position != candidate.position
    ):
        raise StaleVersion(
            f"the candidate was planned on version {candidate.version.number} at position "
            f"{candidate.position} and is not the open one",
            **state.names,
        )
    if candidate.blocks and candidate.unwritten:
        raise WriteFailed(
            f"commit without a write: pages {candidate.unwritten} were not written", **state.names
        )
