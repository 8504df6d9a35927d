"""Decoding with fast weights on a GPU: serial, private dense weights, and the chain of pages.

    python benchmarks/gpu_decode.py --out decode.json      # one GPU, a few minutes
    python benchmarks/gpu_decode.py --tiny                 # no GPU: does the script work?

A decoder of the shape of Qwen3-4B with random bfloat16 weights and six state layers, eager PyTorch,
no server and no CUDA graphs. Needs torch and Triton, not SGLang. All streams hold 4,096 tokens of
KV and decode 512 more; their state has written a prompt of that length (random activations).

serial    one stream after another through the chain of pages; only some streams are run
private   all streams together; torch.bmm over a bfloat16 W of each stream's own, W += V^T H
chain     all streams together; W_0 shared, pages and dense bases as in the server, with its store

Traces, which say when the streams write:

uniform     C = 128; stream i of n starts with i * C / n open rows, so boundaries are spread evenly
bursty      C = 128; all streams start with no open row and reach every boundary together
all-update  C = 1; every token of every stream completes a chunk, so every step writes all streams

Exit status: 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from common import command_line, machine, machine_line, markdown_table, package_version, write_json
from gpu_model import TINY_MODEL, Cache, Model, ModelShape, attention
from gpu_states import Chain, Private, Setup
from gpu_timing import NO_GPU

WAYS = ("serial", "private", "chain")
WARM_UP = 2  # steps that are not timed


@dataclass(frozen=True)
class Load:
    """How much is decoded."""

    streams: int = 8
    context: int = 4096
    tokens: int = 512
    chunk: int = 128
    serial_streams: int = 2


TINY_LOAD = Load(streams=2, context=12, tokens=3, chunk=2, serial_streams=1)


@dataclass(frozen=True)
class Rate:
    """One way on one trace."""

    trace: str
    way: str
    tokens_per_s: float
    peak: int  # bytes allocated at most, weights and KV included


def traces(load: Load, dtype: torch.dtype) -> dict[str, Setup]:
    """Name -> what the streams have written at the start."""
    n, chunk, tokens = load.streams, load.chunk, load.tokens + WARM_UP
    even = tuple(i * chunk // n for i in range(n))
    return {
        "uniform": Setup(chunk, load.context, even, tokens, dtype),
        "bursty": Setup(chunk, load.context, (0,) * n, tokens, dtype),
        "all-update": Setup(1, load.context, (0,) * n, tokens, dtype),
    }


def decode(
    model: Model, cache: Cache, attend: Any, state: Any, groups: Sequence[range], tokens: int
) -> float:
    """Seconds of ``tokens`` steps of every group, one group after the other."""
    taken, device = 0.0, cache.K.device
    for streams in groups:
        cache.reset()
        ids = torch.zeros(len(streams), dtype=torch.int64, device=device)
        for step in range(-WARM_UP, tokens):
            if step == 0:
                start = now(device)
            state.begin(streams)
            rows = slice(streams.start, streams.stop)
            ids = model.step(ids, cache, attend, rows, state.down)
            state.finish()
        taken += now(device) - start
    return taken


def now(device: torch.device) -> float:
    """Seconds, after everything that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(
    model: Model, cache: Cache, attend: Any, load: Load, trace: str, way: str, setup: Setup
) -> Rate:
    """One way on one trace, with a state of its own."""
    place = {"device": cache.K.device, "dtype": cache.K.dtype}
    cuda = cache.K.is_cuda
    groups = [range(load.streams)]
    if way == "serial":
        groups = [range(i, i + 1) for i in range(load.serial_streams)]
        setup = setup._replace(tails=setup.tails[: load.serial_streams])
    state = Private(model, setup, place) if way == "private" else Chain(model.shape, setup, place)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = decode(model, cache, attend, state, groups, load.tokens)
    decoded = load.tokens * sum(len(group) for group in groups)
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return Rate(trace, way, decoded / seconds, peak)


def render(rates: Sequence[Rate]) -> str:
    """One table: rates, and ratios to the serial way of the same trace."""
    serial = {rate.trace: rate.tokens_per_s for rate in rates if rate.way == "serial"}
    rows = [
        [
            rate.trace,
            rate.way,
            f"{rate.tokens_per_s:,.1f}",
            f"{rate.tokens_per_s / serial[rate.trace]:.2f}",
            f"{rate.peak / 1e9:.1f}",
        ]
        for rate in rates
    ]
    header = ["trace", "way", "tokens/s", "this / serial", "peak memory, GB"]
    return markdown_table(header, rows)


def measure_all(
    shape: ModelShape, load: Load, device: torch.device, state_dtype: torch.dtype, kind: str
) -> tuple[str, list[Rate]]:
    """(attention that was used, every way on every trace)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    place = {"device": device, "dtype": dtype}
    model = Model(shape, place)
    cache = Cache(shape, load.streams, load.context, load.tokens + WARM_UP, place)
    attend = attention(kind, cache, shape)
    rates = [
        measure(model, cache, attend, load, trace, way, setup)
        for trace, setup in traces(load, state_dtype).items()
        for way in WAYS
    ]
    return type(attend).__name__, rates


def main(arguments: Sequence[str]) -> int:
    """Measure, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size on the CPU, interpreted")
    parser.add_argument("--tokens", type=int, help="tokens that each stream decodes")
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--attention", choices=["auto", "sdpa", "flashinfer"], default="auto")
    parser.add_argument("--out", type=Path, help="file for the raw measurements, JSON")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2

    torch.manual_seed(0)
    shape, load = (TINY_MODEL, TINY_LOAD) if options.tiny else (ModelShape(), Load())
    load = Load(**(asdict(load) | {"tokens": options.tokens or load.tokens}))
    device = torch.device("cpu" if options.tiny else "cuda")
    facts: dict[str, Any] = machine(torch.get_num_threads())
    facts["triton"] = package_version("triton")
    with torch.inference_mode():
        dtype = getattr(torch, options.state_dtype)
        used, rates = measure_all(shape, load, device, dtype, options.attention)
    print(f"{machine_line(facts)}; triton {facts['triton']}\n")
    print("`" + command_line(__file__, arguments, facts["threads"]) + "`\n")
    if options.tiny:
        print("Toy size in Triton's interpreter: the rates mean nothing.\n")
    print(
        f"{load.streams} streams (serial: {load.serial_streams} of them), {load.context:,} tokens "
        f"of context, {load.tokens} decoded, {options.state_dtype} pages, attention {used}.\n"
    )
    print(render(rates))
    raw = {"machine": facts, "model": asdict(shape), "load": asdict(load), "attention": used}
    write_json(options.out, raw | {"rates": [asdict(rate) for rate in rates]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
