"""What every compiled kernel relies on: torch's threads, arguments, the cache on disk, exp."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from numba.core import caching

from sgl_rwttt.kernels import jit
from sgl_rwttt.kernels.dispatch import compiled


def _fill(pointer):  # type: ignore[no-untyped-def]
    out, count, value = jit.numbers(pointer, 3)
    seen = jit.floats(out, (count, 2))
    number, threads = jit.thread()
    for i in range(number, count, threads):
        seen[i, 0] = threads
        seen[i, 1] = jit.as_float(value)


def _exp(pointer):  # type: ignore[no-untyped-def]
    at, count = jit.numbers(pointer, 2)
    x = jit.floats(at, (count,))
    for i in range(count):
        x[i] = jit.exp(x[i])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_arguments(threads: int) -> None:
    """Guards: a thread's share that nobody takes, a float that arrives as an integer."""
    seen = torch.full((9, 2), torch.nan)
    jit.Kernel(_fill)(threads, seen, 9, 0.375)
    assert seen[:, 1].tolist() == [0.375] * 9
    assert len(set(seen[:, 0].tolist())) == 1 and 1 <= seen[0, 0] <= threads


def test_exp() -> None:
    """Guards: an exponential that is off between two powers of two, and one that hides NaN."""
    x = torch.linspace(-87, 0, 100_001)
    found = x.clone()
    jit.Kernel(_exp)(1, found, found.numel())
    assert (found / x.double().exp() - 1).abs().max() < 4e-7
    edge = torch.tensor([0.0, -1e-30, -200.0, -math.inf, math.nan])
    jit.Kernel(_exp)(1, edge, 5)
    assert edge[:2].tolist() == [1.0, 1.0]
    assert (edge[2:4] <= 2e-38).all() and (edge[2:4] >= 0).all()
    assert edge[4].isnan()


def test_a_kernel_runs_within_torchs_loops() -> None:
    """Guards: a second set of threads that fights with torch's over the cores."""
    code = (
        "import torch; torch.set_num_threads(2)\n"
        "from sgl_rwttt.kernels.few_rows.jit_impl import few_rows\n"
        "import os\n"
        "a, b = torch.randn(2, 400, 400)\n"
        "few_rows(a[:4], b); a @ b; before = len(os.listdir('/proc/self/task'))\n"
        "for _ in range(5): few_rows(a[:4], b); a @ b\n"
        "print(before, len(os.listdir('/proc/self/task')))\n"
    )
    before, after = run_python(code).split()
    assert before == after


def test_platforms_without_it() -> None:
    """Guards: another build of torch, or NUMBA_DISABLE_JIT, on which a server cannot start."""
    code = (
        "from sgl_rwttt.kernels import dispatch, jit\n"
        "print(jit.is_available(), dispatch.compiled('few_rows'))\n"
        "try: jit.Kernel(print).compile()\n"
        "except RuntimeError as error: print(error)\n"
    )
    assert run_python(code, NUMBA_DISABLE_JIT="1").splitlines() == [
        "False None",
        "torch's OpenMP runtime cannot run kernels: see is_available()",
    ]
    assert compiled("few_rows") is not None


def test_folders_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: an installation for all users, with no home either, on which nothing compiles."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    seen = torch.zeros(1, 2)
    jit.Kernel(_fill)(1, seen, 1, 2.5)
    assert seen[0, 1] == 2.5


def run_python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
