"""A step that only reads asks the device for nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode, resolve_name

from sgl_rwttt.srt_ext.options import ENV_OPTIONS
from sgl_rwttt.srt_ext.step import forward_step
from tests.srt_ext.step_bench import OWNERS, PREFILLS, Bench, C

pytestmark = pytest.mark.slow  # the runtime imports SGLang

READS = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "unique"}


class Watch(TorchFunctionMode):
    """Notes every call that would have to wait for a tensor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = (resolve_name(func) or "").rsplit(".", 1)[-1]
        if name in READS or any(_is_mask(item) for item in args):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def _is_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)


def decode(bench: Bench) -> list[str]:
    """One decode step of every owner; what was read back from tensors."""
    ids = [bench.owners[i].tokens(n, n + 1)[0] for i, n in enumerate(bench.lengths)]
    lengths = [n + 1 for n in bench.lengths]
    batch = SimpleNamespace(
        rids=[lineage.branch for lineage in bench.owners],
        forward_mode=SimpleNamespace(is_idle=lambda: False, is_decode=lambda: True),
        seq_lens_cpu=SimpleNamespace(tolist=lambda: lengths),  # on the host in SGLang too
    )
    h, x = bench.h[:, ids], bench.x[:, ids]
    with Watch() as watch, forward_step(bench.runtime, batch) as step:
        assert step is not None
        for slot in (0, 1):
            step.layer(slot, h[slot], x[slot])
    bench.lengths = lengths
    return watch.seen


def test_a_read_step_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a copy back to the host in every decode step, which would stall a GPU."""
    monkeypatch.setenv(ENV_OPTIONS, '{"memory_mb": 1}')
    bench = Bench()
    bench.forward(PREFILLS)
    assert decode(bench) != [], "this step writes: its candidates are judged on the host"
    for _ in range(C - 1):
        assert decode(bench) == []
    assert decode(bench) != []
    assert all(lineage.error is None for lineage in bench.owners)
    assert [lineage.require_state().clock.position for lineage in bench.owners] == [
        n + C + 1 for n in PREFILLS
    ]
    assert len(bench.owners) == OWNERS
    bench.end()
