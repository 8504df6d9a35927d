"""The memo of committed states: which versions and tails are retained, and for how long.

A version is a memo of a pure function, so everything that nobody references may go, least
recently matched first. Each live version is indexed, and the index holds one of its references;
a version is evictable exactly while that is the only one. Eviction therefore runs from the
leaves of the lineage tree towards its roots, one step at a time. An expired version is not kept
as a memo: it goes with its last other reference.
"""

from bisect import bisect_left
from collections import OrderedDict

from sgl_rwttt.core.errors import SlotError, UnknownState
from sgl_rwttt.core.slots import SlotPool
from sgl_rwttt.core.versions import Tail, TailMemo, Version


class StateIndex:
    """Versions by id, their retained tails, reference counts and eviction. Owns the slots."""

    def __init__(self, pages: SlotPool, bases: SlotPool) -> None:
        self.pages = pages
        self.bases = bases
        self.versions: dict[bytes, Version] = {}
        self.evictable: OrderedDict[Version | TailMemo, None] = OrderedDict()
        self.tick = 0
        self.evictions = 0
        self.expirations = 0  # versions forgotten because they were expired
        self.own_pages = 0  # versions with a page of their own
        self.tails = 0  # retained tails

    # references

    def ref(self, version: Version) -> None:
        """Take a reference on a live version."""
        if version.refs < 1:
            raise SlotError(f"version {version.number} was already freed")
        if version.refs == 1:
            self.evictable.pop(version, None)
        version.refs += 1

    def unref(self, version: Version) -> None:
        """Give a reference back; with only the index's one left the version is evictable.

        An expired one is forgotten then.
        """
        self._unref(version)
        self._forget_expired(version)

    def _unref(self, version: Version) -> None:
        if version.refs < 2:
            raise SlotError(f"version {version.number} has no reference to give back")
        version.refs -= 1
        if version.refs == 1:
            self.evictable[version] = None

    def ref_tail(self, tail: Tail) -> None:
        """Take a reference on an open page."""
        tail.refs += 1

    def unref_tail(self, tail: Tail) -> None:
        """Give a reference on an open page back; the last one frees the page."""
        if tail.refs < 1:
            raise SlotError(f"open page {tail.page} was already freed")
        tail.refs -= 1
        if not tail.refs:
            self.pages.free(tail.page)

    def pin_memo(self, memo: TailMemo) -> None:
        """Keep a retained tail from eviction until `unpin_memo`."""
        memo.pins += 1
        self.evictable.pop(memo, None)

    def unpin_memo(self, memo: TailMemo) -> None:
        """Undo one `pin_memo`. The tail of an expired version is forgotten with its last pin."""
        memo.pins -= 1
        if not memo.pins:
            self.evictable[memo] = None
            if memo.version.expired:
                self._forget_tail(memo)

    # publication

    def publish(self, version: Version) -> None:
        """Index a new version, taking over its slots; references its parent. It is evictable."""
        if version.parent is not None:
            self.ref(version.parent)
        version.refs = 1
        version.touched = self.tick
        self.versions[version.id] = version
        self.evictable[version] = None
        self.own_pages += version.page is not None

    def retain(self, version: Version, tail: Tail, rows: int, key: bytes) -> TailMemo:
        """Retain the first `rows` rows of an open page; takes its own references.

        Returns the retained tail that serves these items: an older one when it covers them.
        Unpinned older ones that the new one covers are dropped.
        """
        memos = version.memos
        at = bisect_left(memos, key, key=_key)
        if at < len(memos) and memos[at].key.startswith(key):
            self.touch(memos[at])
            return memos[at]
        memo = TailMemo(version, tail, rows, key)
        memo.touched = self.tick
        self.ref(version)
        self.ref_tail(tail)
        memos.insert(at, memo)
        self.evictable[memo] = None
        self.tails += 1
        while at and key.startswith(memos[at - 1].key) and not memos[at - 1].pins:
            self._forget_tail(memos[at - 1])
            at -= 1
        return memo

    # look-up

    def get(self, version_id: bytes) -> Version:
        """The retained version of that id; raises UnknownState."""
        version = self.versions.get(version_id)
        if version is None:
            raise UnknownState(f"no retained state {version_id.hex()}")
        return version

    def nearest_tails(self, version: Version, key: bytes) -> list[TailMemo]:
        """The retained tails after `version` that may share the longest prefix with `key`."""
        memos = version.memos
        at = bisect_left(memos, key, key=_key)
        return memos[max(0, at - 1) : at + 1]

    def is_retained(self, memo: TailMemo) -> bool:
        """Whether a tail found earlier is still there."""
        return memo.pins > 0 or memo in self.evictable

    def touch(self, item: Version | TailMemo) -> None:
        """Mark as just used."""
        self.tick += 1
        item.touched = self.tick
        if item in self.evictable:
            self.evictable.move_to_end(item)

    # eviction

    def ensure(self, pages: int, bases: int = 0) -> bool:
        """Evict until that many slots are free; False when evicting everything is not enough."""
        while self.pages.available < pages or self.bases.available < bases:
            if not self.evict_one():
                return False
        return True

    def evict_one(self) -> bool:
        """Drop the least recently used memo that nobody references; False when there is none."""
        if not self.evictable:
            return False
        item = next(iter(self.evictable))
        self.evictions += 1
        if isinstance(item, Version):
            self._forget_version(item)
        else:
            self._forget_tail(item)
        return True

    def expire(self, version: Version) -> None:
        """Keep a version no longer as a memo: only while a child, branch, pin or root needs it.

        Its retained tails go at once, pinned ones with their last pin. Starting a branch there,
        or committing that version again, makes it an ordinary memo again (`renew`).
        """
        version.expired = True
        for memo in [memo for memo in version.memos if not memo.pins]:
            self._forget_tail(memo)
        self._forget_expired(version)

    def renew(self, version: Version) -> None:
        """Undo `expire`: somebody goes on from this version."""
        version.expired = False

    def _forget_expired(self, version: Version) -> None:
        if version.expired and version.refs == 1:
            self.expirations += 1
            self._forget_version(version)

    def _forget_version(self, version: Version) -> None:
        """Free what a version owns; expired ancestors that only it needed go too."""
        self._free(version)
        while (parent := version.parent) is not None:
            self._unref_after_child(parent, version.touched)
            if parent.refs > 1 or not parent.expired:
                return
            self.expirations += 1
            self._free(parent)
            version = parent

    def _free(self, version: Version) -> None:
        del self.evictable[version]
        del self.versions[version.id]
        version.refs = 0
        if version.page is not None:
            self.own_pages -= 1
            self.pages.free(version.page)
        if version.owns_base and version.base is not None:
            self.bases.free(version.base)

    def _forget_tail(self, memo: TailMemo) -> None:
        self.evictable.pop(memo, None)
        memos = memo.version.memos
        del memos[bisect_left(memos, memo.key, key=_key)]
        self.tails -= 1
        self.unref_tail(memo.tail)
        self._unref_after_child(memo.version, memo.touched)
        self._forget_expired(memo.version)

    def _unref_after_child(self, version: Version, touched: int) -> None:
        """Give back a dropped child's reference: the parent is not younger by that."""
        self._unref(version)
        if version in self.evictable and version.touched <= touched:
            self.evictable.move_to_end(version, last=False)


def _key(memo: TailMemo) -> bytes:
    return memo.key
