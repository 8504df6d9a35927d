"""Traces of streams for the mode benchmark and the simulation, and what is measured on them.

A trace says how long prompts and answers are, when streams arrive, and so where their boundaries
lie: a stream of p prompt tokens comes to a boundary whenever its position is a multiple of the
chunk C, so p mod C is its phase.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from engine_worker import Stream as Answer
from engine_worker import Window, decode_window

SPREAD = 0.25  # of decode lengths in the phase-skew trace, as a share of the mean
LONGEST = 7 / 4  # decode length of the longest heterogeneous stream over the mean; shortest 1/4


@dataclass(frozen=True)
class Size:
    """How much there is to do; the same for all traces that are compared."""

    streams: int
    prompt: int  # tokens, rounded down to whole chunks; a phase comes on top
    decode: int  # mean tokens generated per stream, the prefill's included
    chunk: int  # C of the checkpoint


DEFAULT = Size(streams=8, prompt=256, decode=65, chunk=32)
"""64 decode steps: with chunks of 32 every stream comes to exactly two boundaries."""


@dataclass(frozen=True)
class Stream:
    """One request."""

    prompt: int  # tokens
    decode: int  # tokens to generate, the first of them by the prefill
    at: float = 0.0  # arrival, in decode steps after the start


@dataclass(frozen=True)
class Trace:
    """Requests against one chunk length."""

    name: str
    chunk: int
    streams: tuple[Stream, ...]


def _with_phases(name: str, size: Size, phases: Sequence[int]) -> Trace:
    base = max(1, size.prompt // size.chunk) * size.chunk
    streams = tuple(Stream(base + phase % size.chunk, size.decode) for phase in phases)
    return Trace(name, size.chunk, streams)


def uniform(size: Size, seed: int) -> Trace:
    """Phases spread evenly over the chunk: at each step about streams / C of them write."""
    phases = [i * size.chunk // size.streams for i in range(size.streams)]
    return _with_phases("uniform", size, phases)


def bursty(size: Size, seed: int) -> Trace:
    """Equal phases: every C steps all streams write together, and nobody in between."""
    return _with_phases("bursty-update", size, [0] * size.streams)


def all_update(size: Size, seed: int) -> Trace:
    """Chunks of one token: every stream writes at every step. Needs an engine with ttt_chunk 1."""
    base = max(1, size.prompt // size.chunk) * size.chunk
    return Trace("all-update", 1, (Stream(base, size.decode),) * size.streams)


def phase_skew(size: Size, seed: int) -> Trace:
    """Boundaries 1, 2, 3, ... steps apart: for every wait budget somebody comes one step too late.

    The seed turns the phases, shuffles the streams and varies the decode lengths by a quarter.
    """
    chance = random.Random(seed)
    turn = chance.randrange(size.chunk)
    phases = [turn + i * (i + 1) // 2 for i in range(size.streams)]
    chance.shuffle(phases)
    trace = _with_phases("phase-skew", size, phases)
    streams = tuple(
        Stream(s.prompt, max(2, round(s.decode * chance.uniform(1 - SPREAD, 1 + SPREAD))))
        for s in trace.streams
    )
    return Trace(trace.name, trace.chunk, streams)


def poisson(size: Size, seed: int) -> Trace:
    """Uniform phases; streams arrive at random, on average over half of the time they run."""
    chance = random.Random(seed)
    at, streams = 0.0, []
    for stream in uniform(size, seed).streams:
        streams.append(Stream(stream.prompt, stream.decode, at))
        at += chance.expovariate(2 * size.streams / size.decode)
    return Trace("poisson", size.chunk, tuple(streams))


def heterogeneous(size: Size, seed: int) -> Trace:
    """Uniform phases; decode lengths from 1/4 to 7/4 of the mean, so that the batch shrinks."""
    last = max(1, size.streams - 1)
    shares = [2 - LONGEST + i / last * 2 * (LONGEST - 1) for i in range(size.streams)]
    random.Random(seed).shuffle(shares)
    streams = tuple(
        Stream(s.prompt, max(2, round(s.decode * share)))
        for s, share in zip(uniform(size, seed).streams, shares, strict=True)
    )
    return Trace("heterogeneous", size.chunk, streams)


TRACES: dict[str, Callable[[Size, int], Trace]] = {
    "uniform": uniform,
    "bursty-update": bursty,
    "all-update": all_update,
    "phase-skew": phase_skew,
    "poisson": poisson,
    "heterogeneous": heterogeneous,
}


@dataclass(frozen=True)
class Timing:
    """What a client sees of one run; seconds, and tokens per second."""

    tokens: int
    seconds: float  # from the first arrival to the last token
    decode_tokens: int  # in the decode window (see `decode_window`)
    decode_seconds: float  # nan when there is no such window
    prefill: float  # until the last first token
    first_p95: float  # from a stream's decode readiness to its first decoded token
    completion_p95: float  # from a stream's arrival to its last token

    @property
    def rate(self) -> float:
        """All tokens over all the time, prefill included."""
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        """Tokens over time in the decode window."""
        return self.decode_tokens / self.decode_seconds


def timing(submitted: Sequence[float], answers: Sequence[Answer]) -> Timing:
    """Times of one run, by when each token came in."""
    start = min(submitted)
    tokens = sum(answer.arrivals[-1][1] for answer in answers)
    end = max(answer.arrivals[-1][0] for answer in answers)
    try:
        window = decode_window(answers)
    except ValueError:
        window = Window(0, math.nan)
    return Timing(
        tokens,
        end - start,
        window.tokens,
        window.seconds,
        max(answer.arrivals[0][0] for answer in answers) - start,
        p95(first_waits(submitted, answers)),
        p95([a.arrivals[-1][0] - at for at, a in zip(submitted, answers, strict=True)]),
    )


def in_turn(timings: Sequence[Timing]) -> Timing:
    """Runs one after the other as one: windows and prefills are added up."""
    return Timing(
        sum(t.tokens for t in timings),
        sum(t.seconds for t in timings),
        sum(t.decode_tokens for t in timings),
        sum(t.decode_seconds for t in timings),
        sum(t.prefill for t in timings),
        p95([t.first_p95 for t in timings]),
        p95([t.completion_p95 for t in timings]),
    )


def most_at_once(answers: Sequence[Answer]) -> int:
    """The largest number of streams between their first and their last token."""
    spans = [(answer.arrivals[0][0], answer.arrivals[-1][0]) for answer in answers]
    return max(sum(first <= start <= last for first, last in spans) for start, _ in spans)


def first_waits(submitted: Sequence[float], answers: Sequence[Answer]) -> list[float]:
    """Seconds from each stream's decode readiness to its first decoded token, which is its second.

    The first token comes with the prefill. A stream is ready when its own prefill is done, and
    those of the streams that had been submitted by then: the scheduler puts prefill before decode.
    """
    waits = []
    for answer in answers:
        first = answer.arrivals[0][0]
        second = next(at for at, count in answer.arrivals if count >= 2)
        before = [
            other.arrivals[0][0]
            for at, other in zip(submitted, answers, strict=True)
            if at <= first and other.arrivals[0][0] <= second
        ]
        waits.append(second - max(before))
    return waits


def p95(values: Sequence[float]) -> float:
    """The 95th percentile, nearest rank: with 20 values or fewer the largest."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def mean(values: Sequence[float]) -> float:
    """The mean of what is defined; nan for nothing."""
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan
