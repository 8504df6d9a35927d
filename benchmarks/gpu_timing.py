"""Timing on a CUDA device: kernels without the gaps of the host, and the limits of the card."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from common import Spread

_AHEAD_CYCLES = 40_000_000  # the device idles about 20 ms, so that the host gets ahead of it
_CALLS = 16  # per round; the host must queue them while the device idles
_WARM_UP = 4
_MICRO = 1e6

NO_GPU = (
    "no CUDA device: nothing was measured. Run this on a machine with a GPU, or with --tiny, "
    "which checks that the script works and measures nothing."
)


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: on the device, and for the host to queue it."""

    us: Spread
    host_us: float


@dataclass(frozen=True)
class Limits:
    """What the card reached in this run; a share of the limit is a share of these."""

    copy: float  # bytes read and written per second, by copying 1 GiB
    matrix: dict[str, float]  # operations per second of torch.matmul, by "bfloat16", "tf32", ...

    def rate(self, dtype: torch.dtype) -> float:
        """Of products in the pools' dtype; float32 is the better of IEEE and three TF32."""
        if dtype == torch.float32:
            return max(self.matrix["float32"], self.matrix["tf32"] / 3)
        return self.matrix[str(dtype).removeprefix("torch.")]


def measure(call: Callable[[int], Any], rounds: int, device: torch.device) -> Timing:
    """Time ``call(turn)``, which takes other inputs each turn. CPU times mean nothing."""
    if device.type != "cuda":
        start = time.perf_counter()
        call(0)
        took = _MICRO * (time.perf_counter() - start)
        return Timing(Spread(took, took, took), took)
    for turn in range(_WARM_UP):
        call(turn)
    taken: list[float] = []
    host: list[float] = []
    for round_ in range(rounds):
        torch.cuda.synchronize()
        torch.cuda._sleep(_AHEAD_CYCLES)
        marks = []
        start = time.perf_counter()
        for turn in range(_CALLS):
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
            call(round_ * _CALLS + turn)
        host.append(_MICRO * (time.perf_counter() - start) / _CALLS)
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
        torch.cuda.synchronize()
        taken += [1e3 * first.elapsed_time(after) for first, after in pairwise(marks)]
    return Timing(Spread.of(taken), Spread.of(host).median)


def measure_limits(device: torch.device) -> Limits:
    """Copy bandwidth and matrix rates of ``device``, on random numbers."""
    cuda = device.type == "cuda"
    halves = torch.rand(2, 2**28 if cuda else 2**12, device=device)
    copy = measure(lambda _: halves[1].copy_(halves[0]), 2, device)
    size = 8192 if cuda else 32
    rates = {}
    for name, dtype in (
        ("float32", torch.float32),
        ("tf32", torch.float32),
        ("bfloat16", torch.bfloat16),
    ):
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
        timing = measure(lambda _, a=a, b=b: a @ b, 1, device)
        rates[name] = 2 * size**3 / seconds(timing)
        torch.backends.cuda.matmul.allow_tf32 = False
    return Limits(halves.nbytes / seconds(copy), rates)


def seconds(timing: Timing) -> float:
    """The median on the device."""
    return timing.us.median / _MICRO
