"""Ids of a lineage against a brute-force oracle that knows only the documented layout."""

import hashlib
import struct
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_rwttt.core import (
    ContextChain,
    Effect,
    InvalidStateRequest,
    LineageClock,
    ModeSpans,
    cleared_root_id,
    root_id,
)

from .fakes import Item, R, W, spans_of, tokens_of

ROOT = root_id("fingerprint", "in_place")
items_lists = st.lists(st.tuples(st.integers(0, 2**40), st.sampled_from([R, W])), max_size=40)
chunks = st.integers(1, 6)


def hashed(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def oracle(items: list[Item], chunk: int) -> tuple[list[tuple[int, bytes]], bytes]:
    """Boundaries and the state id, token by token."""
    version, pending, rows, passed = ROOT, b"", 0, []
    for position, (token, mode) in enumerate(items, 1):
        pending += struct.pack("<q", 2 * token + (mode is W))
        rows += mode is W
        if rows == chunk:
            version, pending, rows = hashed(b"v" + version + pending), b"", 0
            passed.append((position, version))
    return passed, hashed(b"t" + version + pending) if pending else version


def pushed(items: list[Item], chunk: int, cuts: list[int]) -> tuple[LineageClock, list]:
    """Push in pieces: at every cut and at every change of mode."""
    clock, passed, spans = LineageClock(ROOT, chunk), [], spans_of(items)
    edges = sorted({0, len(items), *(c for c in cuts if c < len(items))})
    for a, b in pairwise(edges):
        for start, stop, mode in spans.runs(a, b):
            passed += clock.push(tokens_of(items)[start:stop], mode)
    return clock, passed


@settings(deadline=None)
@given(items_lists, chunks, st.lists(st.integers(0, 40), max_size=4))
def test_clock_equals_the_oracle_however_the_tokens_are_cut(items, chunk, cuts):
    """Chunked prefill that differs from one-shot (field failure 4): same ids for every split."""
    clock, passed = pushed(items, chunk, cuts)
    expected, state_id = oracle(items, chunk)
    assert [(b.position, b.version_id) for b in passed] == expected
    assert [b.number for b in passed] == list(range(1, len(expected) + 1))
    assert (clock.state_id, clock.position) == (state_id, len(items))
    since = items[expected[-1][0] if expected else 0 :]
    assert clock.items == tuple(since)
    assert clock.rows == sum(mode is W for _, mode in since)


@settings(deadline=None)
@given(items_lists, chunks)
def test_chain_answers_every_prefix(items, chunk):
    """A cached chain that answers for another prefix: each n equals a cold hash of n tokens."""
    chain = ContextChain(ROOT, chunk, number=3)
    for stop in (len(items) // 3, len(items)):
        chain.sync(tokens_of(items), spans_of(items), stop)
    for n in range(len(items) + 1):
        passed, state_id = oracle(items[:n], chunk)
        assert chain.state_id_at(n) == state_id
        assert [(b.position, b.version_id) for b in chain.boundaries(n)] == [(0, ROOT), *passed]
        clock = chain.clock_at(n)
        assert (clock.state_id, clock.number, clock.position) == (state_id, 3 + len(passed), n)
        more = [(7, W)] * (2 * chunk)
        clock.push(tokens_of(more), W)
        assert clock.state_id == oracle(items[:n] + more, chunk)[1]


def test_copy_is_independent():
    """A fork by reference: pushing to one clock must not move its copy."""
    clock = LineageClock(ROOT, 4)
    clock.push([1, 2], W)
    before = clock.state_id
    clock.copy().push([3, 4, 5], W)
    assert (clock.state_id, clock.rows) == (before, 2)


def test_mode_root_and_order_are_part_of_the_identity():
    """A token read frozen meeting the same token in write mode (field failure 14)."""
    ids = set()
    for root in (ROOT, root_id("fingerprint", "other"), cleared_root_id(ROOT)):
        for items in ([(1, W)], [(1, R)], [(1, R), (2, W)], [(2, W), (1, R)], []):
            chain = ContextChain(root, 4)
            chain.sync(tokens_of(items), spans_of(items))
            ids.add(chain.state_id_at(len(items)))
    assert len(ids) == 15
    assert root_id("ab", "c") != root_id("a", "bc")


@settings(deadline=None)
@given(st.lists(st.sampled_from([R, W]), max_size=20), st.data())
def test_spans_say_the_mode_of_every_token(modes, data):
    """A run-length list that is off by one shifts evidence to the wrong token."""
    spans = spans_of([(0, mode) for mode in modes])
    assert len(spans) == len(modes)
    assert [spans.mode_at(i) for i in range(len(modes))] == modes
    assert spans.all_write == (R not in modes)
    a = data.draw(st.integers(0, len(modes)))
    b = data.draw(st.integers(a, len(modes)))
    runs = list(spans.runs(a, b))
    assert [mode for x, y, mode in runs for _ in range(x, y)] == modes[a:b]
    assert all(x[2] is not y[2] for x, y in pairwise(runs))
    assert spans.slice(b) == spans_of([(0, mode) for mode in modes[:b]])


@pytest.mark.parametrize("bad", [["x"], [1.5], [2**70], [None]])
def test_tokens_that_are_no_ids_are_refused_unchanged(bad):
    """Half-pushed tokens: the clock stays where it was."""
    clock = LineageClock(ROOT, 2)
    with pytest.raises(InvalidStateRequest):
        clock.push([1, 2, 3, *bad], W)
    assert (clock.position, clock.state_id) == (0, ROOT)
    with pytest.raises(InvalidStateRequest):
        clock.push([1], Effect.CONTROL)
    with pytest.raises(InvalidStateRequest):
        ModeSpans(1, Effect.CONTROL)
