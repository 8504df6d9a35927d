"""The in-place backend behind the real store against the one-token-at-a-time oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.spans import ModeSpans
from tests.assert_close import assert_close
from tests.backends.in_place_rig import Rig, some_tokens

READ, WRITE = Effect.READ, Effect.WRITE
CHUNKS = [1, 4, 5, 8]
FOLDS = [0, 1, 2, 3]


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert_close(found, expected, 2e-5)


@pytest.mark.parametrize("proj", [True, False], ids=["proj", "noproj"])
@pytest.mark.parametrize(("d_model", "d_ff"), [(63, 100), (16, 32), (1, 3)])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_one_shot_prefill(chunk: int, d_model: int, d_ff: int, proj: bool) -> None:
    """A prefill over many chunks that answers a row from the wrong one of its chunks' versions."""
    rig = Rig(chunk, d_model=d_model, d_ff=d_ff, proj=proj)
    tokens = some_tokens(5 * chunk + 2)
    same(rig.write(rig.start("a"), tokens), rig.expected(tokens))


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_every_split(chunk: int, fold: int) -> None:
    """Boundaries that move with the scheduler's cut, a carried tail that is lost or read twice."""
    tokens = some_tokens(3 * chunk + 1)
    expected = Rig(chunk).expected(tokens)
    for cut in range(1, len(tokens)):
        rig = Rig(chunk, fold)
        state = rig.start("a")
        parts = [rig.write(state, tokens[:cut]), rig.write(state, tokens[cut:])]
        same(torch.cat(parts, 1), expected)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_decode(chunk: int, fold: int) -> None:
    """Decode, where every boundary is deferred, that differs from prefill."""
    rig, tokens = Rig(chunk, fold), some_tokens(4 * chunk + 1)
    state = rig.start("a")
    deltas = [rig.write(state, [token]) for token in tokens]
    same(torch.cat(deltas, 1), rig.expected(tokens))


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_prefill(chunk: int) -> None:
    """Prefill pieces shorter than, equal to and longer than the update chunk."""
    tokens = some_tokens(4 * chunk + 3)
    expected = Rig(chunk).expected(tokens)
    for size in sorted({1, 3, max(chunk - 1, 1), chunk, chunk + 1, 7}):
        rig = Rig(chunk, fold_pages=2)
        state = rig.start("a")
        pieces = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        same(torch.cat([rig.write(state, piece) for piece in pieces], 1), expected)


@pytest.mark.parametrize("chunk", [1, 4])
def test_weights_and_tail(chunk: int) -> None:
    """The exported dense weight, or the open page's evidence, of another point than asked for."""
    rig, tokens = Rig(chunk, fold_pages=2), some_tokens(5 * chunk + chunk - 1)
    state = rig.start("a")
    rig.write(state, tokens)
    for slot, oracle in enumerate(rig.oracles()):
        for token in tokens:
            oracle.step(rig.h[slot, token], rig.t[slot, token], True)
        same(rig.backend.dense(state.version, slot), oracle.W)
        if state.tail is not None:
            h, t = rig.backend.tail(state.tail.page, state.tail.rows, slot)
            assert torch.equal(h, torch.stack(oracle.h_rows))
            assert torch.equal(t, torch.stack(oracle.t_rows))
    rows = len(state.version.pages) * chunk
    exported = rig.backend.export(state.version)
    assert exported["H"].shape == (2, rows, 20) and exported["V"].shape == (2, rows, 12)
    assert ("D" in exported) == (state.version.base is not None)


def test_empty_state() -> None:
    """A state without chunks that adds something to W_0."""
    rig = Rig(8)
    assert not rig.write(rig.start("a"), some_tokens(7)).any()
    assert not rig.forward([(rig.start("b"), some_tokens(9), READ)])[0].any()


@pytest.mark.parametrize("fold", FOLDS)
def test_read_spans(fold: int) -> None:
    """READ tokens that leave evidence, or that move a boundary."""
    rig, tokens, modes = Rig(4, fold), some_tokens(40), ModeSpans()
    for count, mode in [(3, WRITE), (2, READ), (9, WRITE), (8, READ), (2, WRITE), (16, WRITE)]:
        modes.append(count, mode)
    expected = rig.expected(tokens, modes)
    state = rig.start("a")
    same(rig.forward([(state, tokens, modes)])[0], expected)
    for cut in range(1, len(tokens)):
        rig = Rig(4, fold)
        state = rig.start("a")
        first = rig.forward([(state, tokens[:cut], modes)])[0]
        same(torch.cat([first, rig.forward([(state, tokens[cut:], modes)])[0]], 1), expected)


@pytest.mark.parametrize("fold", FOLDS)
def test_siblings(fold: int) -> None:
    """Forks in one batch whose shared pages are read for one of them only, or written by one."""
    rig, tokens = Rig(4, fold), some_tokens(18)
    parent = rig.start("a")
    rig.write(parent, tokens)
    twins = [rig.store.fork(parent, "a", f"fork{i}") for i in range(3)]
    rests = [some_tokens(7, seed) for seed in range(1, 4)]
    found = [
        rig.forward([(twin, [rest[i]], WRITE) for twin, rest in zip(twins, rests, strict=True)])
        for i in range(7)
    ]
    for k, rest in enumerate(rests):
        same(torch.cat([step[k] for step in found], 1), rig.expected(tokens + rest)[:, 18:])
    same(rig.write(parent, rests[0]), rig.expected(tokens + rests[0])[:, 18:])


def test_rows_permuted_and_padded() -> None:
    """Owners that get each other's rows, or padded rows that reach a live page."""
    lengths, runs = [3, 6, 9, 11], []
    for rows, padding in [((0, 1, 2, 3), 0), ((2, 0, 3, 1), 5), ((3, 2, 1, 0), 1)]:
        rig = Rig(4, fold_pages=2)
        states = [rig.start(f"o{i}") for i in range(4)]
        tokens = [some_tokens(n + 6, i) for i, n in enumerate(lengths)]
        found = [
            rig.forward(
                [(s, t[:n], WRITE) for s, t, n in zip(states, tokens, lengths, strict=True)],
                rows,
                padding,
            )
        ]
        for i in range(6):
            writes = [
                (s, t[n + i : n + i + 1], WRITE)
                for s, t, n in zip(states, tokens, lengths, strict=True)
            ]
            found.append(rig.forward(writes, rows, padding))
        runs.append([torch.cat([step[k] for step in found], 1) for k in range(4)])
    for k, deltas in enumerate(runs[0]):
        same(deltas, rig.expected(tokens[k]))
        assert torch.equal(deltas, runs[1][k]) and torch.equal(deltas, runs[2][k])


def test_bfloat16_pools() -> None:
    """Pools of another dtype than the products: a cast that is missing or taken twice."""
    rig, tokens = Rig(4, fold_pages=3, dtype=torch.bfloat16), some_tokens(30)
    state = rig.start("a")
    found = torch.cat([rig.write(state, tokens[:17]), rig.write(state, tokens[17:])], 1)
    assert found.dtype == torch.float32
    assert_close(found, rig.expected(tokens), 2e-2)


@dataclass
class Stream:
    """One branch of the walk and its context so far."""

    state: OwnerState
    tokens: list[int] = field(default_factory=list)
    modes: ModeSpans = field(default_factory=ModeSpans)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("chunk", [1, 4, 5])
@pytest.mark.parametrize("seed", range(2))
def test_walk(chunk: int, fold: int, seed: int) -> None:
    """Any interleaving of prefill, decode, READ, fork, drop and release of several owners."""
    rng, rig = random.Random(seed), Rig(chunk, fold, pages=400, bases=60)
    streams = [Stream(rig.start(f"o{i}")) for i in range(4)]
    for step in range(25):
        _branch(rng, rig, streams, step)
        chosen = rng.sample(streams, rng.randint(1, len(streams)))
        new = [_extension(rng, chunk, decode=step % 3 > 0) for _ in chosen]
        contexts = [_extended(s, *n) for s, n in zip(chosen, new, strict=True)]
        writes = [
            (s.state, n[0], modes) for s, n, (_, modes) in zip(chosen, new, contexts, strict=True)
        ]
        rows = rng.sample(range(len(chosen)), len(chosen))
        if rng.random() < 0.2:
            candidates = rig.begin(writes, rows)
            rig.layers(candidates, [w[1] for w in writes])
            for candidate in candidates:
                rig.store.drop(candidate)
        deltas = rig.forward(writes, rows, padding=rng.randint(0, 2))
        for stream, (tokens, modes), delta in zip(chosen, contexts, deltas, strict=True):
            same(delta, rig.expected(tokens, modes)[:, len(stream.tokens) :])
            stream.tokens, stream.modes = tokens, modes


def _extension(rng: random.Random, chunk: int, decode: bool) -> tuple[list[int], Effect]:
    count = 1 if decode else rng.randint(1, 3 * chunk)
    return [rng.randrange(50) for _ in range(count)], READ if rng.random() < 0.2 else WRITE


def _extended(stream: Stream, new: list[int], mode: Effect) -> tuple[list[int], ModeSpans]:
    modes = stream.modes.slice(len(stream.tokens))
    modes.append(len(new), mode)
    return stream.tokens + new, modes


def _branch(rng: random.Random, rig: Rig, streams: list[Stream], step: int) -> None:
    """Now and then fork a stream, or restart it from whatever is retained of its prefix."""
    stream = rng.choice(streams)
    if rng.random() < 0.2 and len(streams) < 7:
        twin = rig.store.fork(stream.state, f"f{step}", "b")
        streams.append(Stream(twin, list(stream.tokens), stream.modes.slice(len(stream.tokens))))
    elif rng.random() < 0.2:
        rig.store.release(stream.state)
        keep = rng.randint(0, len(stream.tokens))
        tokens, modes = stream.tokens[:keep], stream.modes.slice(keep)
        stream.state = rig.start(f"r{step}", tokens, modes)
        depth = stream.state.clock.position
        stream.tokens, stream.modes = tokens[:depth], modes.slice(depth)
