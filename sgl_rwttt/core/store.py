"""The store of read-write state: who owns which version, and how a version comes to be."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count

from sgl_rwttt.core.candidate import Candidate
from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.contexts import ContextPath
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import (
    BranchBusy,
    InvalidStateRequest,
    OwnerReleased,
    StaleVersion,
    WriteFailed,
)
from sgl_rwttt.core.holdings import Holding, counts, holdings
from sgl_rwttt.core.index import StateIndex
from sgl_rwttt.core.integrity import audit
from sgl_rwttt.core.lineage import clock_after, count_writes, encode, pack
from sgl_rwttt.core.matching import match_chain
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.pins import PinTable
from sgl_rwttt.core.segment import Evidence
from sgl_rwttt.core.slot_writes import SlotWritePath
from sgl_rwttt.core.slots import SlotPool
from sgl_rwttt.core.snapshots import SnapshotPath
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.versions import Match, StateView, Version
from sgl_rwttt.core.writes import WritePath


class TTTStateStore:
    """Owners, versions and slots of one model. Single-threaded (the scheduler's thread).

    A write goes begin_write -> (forward, `Candidate.mark_written`) -> commit or drop. Nothing
    of a candidate is visible before commit. Every method that raises has changed nothing but
    the memo (eviction may have run).
    """

    def __init__(
        self,
        pages: SlotPool,
        bases: SlotPool,
        chunk: int,
        fold_pages: int,
        root: bytes,
        copy_rows: Callable[[int, int, int], None],
        evidence: Evidence = "rows",
        more_roots: Mapping[bytes, tuple[int, ...]] | None = None,
    ) -> None:
        """`copy_rows(src_page, dst_page, rows)` copies the first rows of a page, all layers.

        `fold_pages`: a version that reads this many pages gets a dense base; 0 for never.
        `evidence`: with "rows" a branch fills an open page and a version reads one page more than
        its predecessor; with "tokens" a version is one page, and nothing is kept of a tail.
        `more_roots`: default roots beside `root`, with the pages outside the pool that they read.
        """
        self.chunk = chunk
        self._pages = pages
        self._bases = bases
        self._index = StateIndex(pages, bases)
        self._pins = PinTable(self._index, {root: (), **(more_roots or {})})
        self.snapshots = SnapshotPath(self._index, self._pins)
        self._evidence = evidence
        self.contexts = ContextPath(self._index, self._pins, self.snapshots, evidence)
        path = WritePath if evidence == "rows" else SlotWritePath
        self._writes = path(self._index, chunk, fold_pages, copy_rows, self._bases_in_use)
        self._owners: dict[tuple[str, str], OwnerState] = {}
        self._generations = count(1)
        self._forks = 0

    # where a context can start

    def match(
        self,
        root: bytes,
        tokens: Sequence[int],
        spans: ModeSpans,
        limit: int,
        chain: ContextChain | None = None,
    ) -> Match:
        """Deepest point <= `limit` of the context whose state is retained; allocates nothing.

        With `chain` (of the same root) the tokens are hashed only where it does not reach yet.
        Raises UnknownState for a root that is not open, InvalidStateRequest for a bad limit.
        """
        self._pins.owners_of(root)
        known = max(len(tokens), len(chain) if chain is not None else 0)
        if not 0 <= limit <= known:
            raise InvalidStateRequest(f"limit {limit} is outside 0..{known}")
        if chain is None:
            chain = ContextChain(root, self.chunk)
        elif chain.root != root or chain.chunk != self.chunk:
            raise InvalidStateRequest("the chain belongs to another root or chunk length")
        chain.sync(tokens, spans, limit)
        return match_chain(self._index, chain, limit, self._evidence)

    def create(
        self,
        owner: str,
        branch: str,
        match: Match,
        root: bytes,
        tokens: Sequence[int],
        spans: ModeSpans,
    ) -> OwnerState:
        """Start a branch at `match.depth` of the context that was matched.

        With `match.rows` it takes a page and copies the retained rows (copy on write). Raises
        StaleVersion when the match was evicted meanwhile, BranchBusy for a branch that is live,
        StateCapacity, and whatever `copy_rows` raises; nothing changes then.
        """
        self._check_free(owner, branch)
        version, memo = match.version, match.tail
        if version.refs < 1 or (memo is not None and not self._index.is_retained(memo)):
            raise StaleVersion("the matched state was evicted", owner=owner, branch=branch)
        codes = array("q")
        for a, b, mode in spans.runs(match.boundary, match.depth):
            codes.extend(encode(tokens[a:b], mode))
        if count_writes(pack(codes)) != match.rows:
            raise InvalidStateRequest("the match is of other tokens", owner=owner, branch=branch)
        clock = clock_after(root, self.chunk, version.id, version.number, codes, match.depth)
        state = OwnerState(owner, branch, next(self._generations), version, None, clock)
        self._index.ref(version)
        if memo is not None:
            self._index.pin_memo(memo)
        try:
            if memo is not None:
                state.tail = self._writes.copied_tail(state, memo.tail.page, match.rows)
            self._index.renew(version)
        except BaseException:
            self._index.unref(version)
            raise
        finally:
            if memo is not None:
                self._index.unpin_memo(memo)
        self._owners[owner, branch] = state
        return state

    def fork(self, state: OwnerState, owner: str, branch: str) -> OwnerState:
        """A new branch at the present point of a live one; shares until either writes.

        Raises OwnerReleased, BranchBusy (open write, or a live target), WriteFailed for a failed
        branch, StateCapacity.
        """
        self._check_free(owner, branch)
        self._check_idle(state)
        twin = OwnerState(
            owner, branch, next(self._generations), state.version, None, state.clock.copy()
        )
        if state.tail is not None:
            twin.tail = self._writes.copied_tail(twin, state.tail.page, state.clock.rows)
        self._index.ref(state.version)
        self._owners[owner, branch] = twin
        self._forks += 1
        return twin

    def view(self, state: OwnerState) -> StateView:
        """What a live branch reads now. Raises OwnerReleased."""
        self._check_live(state)
        return state.view()

    def owner_state(self, owner: str, branch: str) -> OwnerState | None:
        """The live record of a branch, if there is one."""
        return self._owners.get((owner, branch))

    # the write path

    def begin_write(
        self, state: OwnerState, tokens: Sequence[int], modes: ModeSpans | Effect, start_row: int
    ) -> Candidate:
        """Plan the next tokens of a branch for one forward; they stand at `start_row` there.

        `modes` is one mode for all of them, or the context's spans (absolute positions: token i
        is at `state.clock.position + i`). Takes the pages and fold bases that the plan needs and
        publishes nothing. Raises OwnerReleased, BranchBusy while another write is open,
        WriteFailed for a failed branch, InvalidStateRequest, StateCapacity.
        """
        self._check_idle(state)
        if not len(tokens):
            raise InvalidStateRequest("a write of no tokens", **state.names)
        return self._writes.begin(state, tokens, modes, start_row)

    def pages_needed(self, state: OwnerState, writes: int, tokens: int | None = None) -> int:
        """Pages that `begin_write` takes for `tokens` tokens, `writes` of them WRITE, now."""
        return self._writes.layout(state, writes, writes if tokens is None else tokens).fresh

    def commit(self, candidate: Candidate) -> list[Version]:
        """Publish a candidate: its blocks become versions, the branch's tail and clock advance.

        Returns the versions passed, oldest first. A version that is already retained is adopted
        and the candidate's page freed. Raises OwnerReleased, StaleVersion when the candidate is
        closed or the branch moved, WriteFailed when a completed block was never written; nothing
        changes then.
        """
        return self._writes.commit(candidate)

    def drop(self, candidate: Candidate) -> None:
        """Give back what a candidate took; the branch keeps its version and tail. Idempotent.

        Dropping after the open page was written in place (`mark_written` of a one-token write)
        loses the tail's evidence: the branch is marked failed and must be released.
        """
        self._writes.drop(candidate)

    def release(self, state: OwnerState, keep_tail: bool = True) -> None:
        """End a branch: drop its open write, retain its tail as a memo, give up its references.

        Raises OwnerReleased on a second release.
        """
        self._check_live(state)
        if state.candidate is not None:
            self._writes.drop(state.candidate)
        if state.tail is not None:
            if keep_tail and not state.failed:
                self._index.retain(state.version, state.tail, state.clock.rows, state.tail_key)
            self._index.unref_tail(state.tail)
            state.tail = None
        self._index.unref(state.version)
        state.released = True
        del self._owners[state.owner, state.branch]

    # roots and pins

    def open_root(self, owner: str, version: Version) -> bytes:
        """See `PinTable.open_root`."""
        return self._pins.open_root(owner, version)

    def roots_of(self, owner: str) -> list[bytes]:
        """See `PinTable.roots_of`."""
        return self._pins.roots_of(owner)

    def root(self, owner: str, root: bytes) -> Version:
        """See `PinTable.root`."""
        return self._pins.root(owner, root)

    def close_root(self, owner: str, root: bytes) -> None:
        """See `PinTable.close_root`."""
        self._pins.close_root(owner, root)

    def pin(self, owner: str, name: str, state: OwnerState) -> None:
        """See `PinTable.pin`. Raises OwnerReleased too."""
        self._check_live(state)
        self._pins.pin(owner, name, state)

    def unpin(self, owner: str, name: str) -> None:
        """See `PinTable.unpin`."""
        self._pins.unpin(owner, name)

    def pin_names(self, owner: str) -> tuple[str, ...]:
        """See `PinTable.names`."""
        return self._pins.names(owner)

    def release_owner(self, owner: str) -> int:
        """Drop every root and pin of an owner; its running branches go on. Returns the count."""
        return self._pins.release_owner(owner)

    # memory

    def expire(self, version_id: bytes) -> None:
        """See `StateIndex.expire`; an id that is not retained is ignored."""
        version = self._index.versions.get(version_id)
        if version is not None:
            self._index.expire(version)

    def ensure_pages(self, n: int, bases: int = 0) -> bool:
        """Evict memos until `n` pages (and `bases` bases) are free; False when impossible."""
        return self._index.ensure(n, bases)

    def flush(self) -> int:
        """Drop every memo that nobody references; returns how many."""
        dropped = 0
        while self._index.evict_one():
            dropped += 1
        return dropped

    def holdings(self, owners: Iterable[str], others: Holding | None = None) -> dict[str, Holding]:
        """What each of these owners holds: branches, roots, pins and their slots.

        `others`, if given, takes what all other owners hold.
        """
        return holdings(owners, self._owners.values(), self._pins, others)

    def stats(self) -> dict[str, int]:
        """Counts for reports and metrics."""
        own = {"owners": len(self._owners), "forks": self._forks}
        return own | counts(self._index, self._pins) | self._writes.counters

    def check_integrity(self) -> None:
        """Recount all references and both ledgers; raises IntegrityError with the numbers."""
        audit(self._index, self._owners.values(), self._pins, self._evidence)

    def _bases_in_use(self) -> int:
        """Bases that a branch, pin, root or open candidate needs."""
        owners = self._owners.values()
        used = {state.version.base for state in owners}
        used.update(version.base for version, _ in self._pins.held())
        open_bases = sum(len(state.candidate.bases) for state in owners if state.candidate)
        return len(used - {None}) + open_bases

    def _check_live(self, state: OwnerState) -> None:
        if state.released:
            raise OwnerReleased("the branch was released", **state.names)

    def _check_idle(self, state: OwnerState) -> None:
        self._check_live(state)
        if state.candidate is not None:
            raise BranchBusy("the branch has an open write", **state.names)
        if state.failed:
            raise WriteFailed("the branch failed; release it", **state.names)

    def _check_free(self, owner: str, branch: str) -> None:
        if (owner, branch) in self._owners:
            raise BranchBusy("the branch is live", owner=owner, branch=branch)
