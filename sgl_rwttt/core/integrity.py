"""The audit behind `TTTStateStore.check_integrity`: recount everything from what is held."""

from collections import Counter
from collections.abc import Iterable

from sgl_rwttt.core.errors import IntegrityError
from sgl_rwttt.core.index import StateIndex
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.pins import PinTable
from sgl_rwttt.core.segment import Evidence
from sgl_rwttt.core.slots import SlotPool
from sgl_rwttt.core.versions import Tail, TailMemo, Version


def audit(
    index: StateIndex, owners: Iterable[OwnerState], pins: PinTable, evidence: Evidence
) -> None:
    """Raise IntegrityError when a count, a list or a ledger disagrees with the holders."""
    owners = list(owners)
    _audit_versions(index, owners, pins)
    tails = _audit_tails(index, owners, pins)
    for state in owners if evidence == "rows" else ():
        if (state.tail.rows if state.tail else 0) != state.clock.rows:
            raise IntegrityError(f"{state!r} has {state.clock.rows} rows, tail {state.tail!r}")
    open_candidates = [state.candidate for state in owners if state.candidate]
    pages = [tail.page for tail in tails]
    pages += [v.page for v in index.versions.values() if v.page is not None]
    pages += [page for candidate in open_candidates for page in candidate.pages]
    bases = [v.base for v in index.versions.values() if v.owns_base and v.base is not None]
    bases += [base for candidate in open_candidates for base in candidate.bases]
    _audit_ledger(index.pages, pages)
    _audit_ledger(index.bases, bases)


def _audit_versions(index: StateIndex, owners: list[OwnerState], pins: PinTable) -> None:
    own_pages = sum(version.page is not None for version in index.versions.values())
    if own_pages != index.own_pages:
        raise IntegrityError(f"{own_pages} versions own a page, {index.own_pages} counted")
    refs: Counter[Version] = Counter(index.versions.values())
    refs.update(state.version for state in owners)
    refs.update(version for version, _ in pins.held())
    refs.update(v.parent for v in index.versions.values() if v.parent is not None)
    refs.update(memo.version for v in index.versions.values() for memo in v.memos)
    for version, count in refs.items():
        if index.versions.get(version.id) is not version:
            raise IntegrityError(f"{version!r} is held {count} times and not indexed")
        if version.refs != count:
            raise IntegrityError(f"{version!r} counts {version.refs} references, holders {count}")
        if version.expired and count == 1:
            raise IntegrityError(f"{version!r} is expired and nothing needs it")
        if (count == 1) != (version in index.evictable):
            raise IntegrityError(f"{version!r} with {count} holders is filed wrongly for eviction")
        if version.id not in pins.defaults:
            _audit_reading(version)


def _audit_reading(version: Version) -> None:
    """What a version reads belongs to it or to its parent's reading."""
    parent = version.parent
    if version.owns_base:
        wanted: tuple[int | None, tuple[int, ...]] = (version.base, ())
    else:
        base, pages = (parent.base, parent.pages) if parent else (None, ())
        wanted = (base, pages if version.page is None else (*pages, version.page))
    if (version.base, version.pages) != wanted:
        raise IntegrityError(f"{version!r} reads {(version.base, version.pages)}, not {wanted}")


def _audit_tails(index: StateIndex, owners: list[OwnerState], pins: PinTable) -> set[Tail]:
    memos = [memo for version in index.versions.values() for memo in version.memos]
    pinned: Counter[TailMemo] = Counter(memo for _, memo in pins.held() if memo is not None)
    refs: Counter[Tail] = Counter(memo.tail for memo in memos)
    refs.update(state.tail for state in owners if state.tail is not None)
    if len(memos) != index.tails or not set(pinned) <= set(memos):
        raise IntegrityError(f"{len(memos)} retained tails, {index.tails} counted")
    for memo in memos:
        if memo.pins != pinned[memo] or (memo.pins == 0) != (memo in index.evictable):
            raise IntegrityError(f"{memo!r} counts {memo.pins} pins, holders {pinned[memo]}")
        if not 0 < memo.rows <= memo.tail.rows:
            raise IntegrityError(f"{memo!r} has {memo.rows} rows of {memo.tail.rows}")
    for tail, count in refs.items():
        if tail.refs != count:
            raise IntegrityError(f"{tail!r} has {count} holders")
    for version in index.versions.values():
        keys = [memo.key for memo in version.memos]
        if keys != sorted(set(keys)):
            raise IntegrityError(f"retained tails of {version!r} are not in order")
    extra = len(index.evictable) - sum(v.refs == 1 for v in index.versions.values())
    if extra != sum(memo.pins == 0 for memo in memos):
        raise IntegrityError(f"{len(index.evictable)} evictable memos do not match the index")
    return set(refs)


def _audit_ledger(pool: SlotPool, held: list[int]) -> None:
    pool.check_integrity()
    dead = [slot for slot in held if not pool.is_live(slot)]
    if dead or len(set(held)) != len(held) or len(held) != pool.live:
        raise IntegrityError(
            f"{pool.name}: {len(held)} slots held ({len(set(held))} distinct, dead {dead}), "
            f"free {pool.available} + live {pool.live} + reserved {pool.reserved} of {pool.total}"
        )
