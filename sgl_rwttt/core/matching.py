"""Finding the deepest point of a token list whose state is retained."""

from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.index import StateIndex
from sgl_rwttt.core.lineage import count_writes, write_flags
from sgl_rwttt.core.segment import Evidence
from sgl_rwttt.core.versions import Match, TailMemo

_ITEM = 8  # bytes of one coded item


def match_chain(index: StateIndex, chain: ContextChain, limit: int, evidence: Evidence) -> Match:
    """Deepest point <= `limit` of `chain` with retained state; touches what it finds.

    From the deepest retained boundary the state still serves every following READ token, and a
    retained tail serves as many WRITE tokens as its items have in common with ours, and the
    READ tokens after them. Where the evidence is token ids there is nothing to retain of a tail.
    """
    at = chain.index_at(limit)
    version = index.versions.get(chain.version_id(at))
    while version is None:
        at -= 1
        version = index.versions.get(chain.version_id(at))
    index.touch(version)
    boundary = chain.boundary(at).position
    end = min(limit, chain.boundary(at + 1).position - 1) if at + 1 < chain.count else limit
    codes = chain.codes_between(boundary, end)
    if evidence == "tokens":
        return Match(end, version, None, count_writes(codes), boundary)
    memo, rows, shared = _best_tail(index.nearest_tails(version, codes), codes)
    if memo is not None:
        index.touch(memo)
    after = write_flags(codes).find(1, shared)
    depth = end if after < 0 else boundary + after
    return Match(depth, version, memo, rows, boundary)


def _best_tail(memos: list[TailMemo], codes: bytes) -> tuple[TailMemo | None, int, int]:
    """(tail, WRITE tokens, items) of the longest useful common prefix; (None, 0, 0) if none."""
    best: TailMemo | None = None
    rows = shared = 0
    for memo in memos:
        common = _common_items(memo.key, codes)
        writes = count_writes(codes[: common * _ITEM])
        if writes > rows:
            best, rows, shared = memo, writes, common
    return best, rows, shared


def _common_items(a: bytes, b: bytes) -> int:
    """Number of equal leading items."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // _ITEM
    differing = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    first_bit = (differing & -differing).bit_length() - 1
    return first_bit // 8 // _ITEM
