"""Failure injection for tests: named points of an owner's life, and what happens there.

While nothing is armed, `reach` is one look at a module global. A served process can be armed only
when `RWTTT_TEST_FAULTS=1` was set at its start (see docs/failures.md); in process, a test arms
with `armed`.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sgl_rwttt.core.errors import InvalidStateRequest

ENV_FAULTS = "RWTTT_TEST_FAULTS"

POINTS: dict[str, str] = {
    "queued": "scheduler: the request waits, nothing of it is held",
    "matched": "radix cache: its prefix was looked up, nothing of it is held",
    "allocated": "radix cache: its state exists, no token has run",
    "mid_prefill": "step: some of its prompt has run and is committed, the rest has not",
    "mid_tail": "step: its newest chunk is open, a token of it has run",
    "boundary_before_commit": "step: its chunk is complete and written, not committed",
    "after_commit": "step: a version was committed by this forward pass",
    "finished": "runtime: its last token has run, its state is not released",
    "write.begin": "store: before a write takes anything",
    "write.batch": "backend: inside a BoundaryUpdate, before V is computed",
    "write.candidate": "backend: V of one block was computed, not checked",
    "publish.allocated": "store: slots were taken, nothing refers to them",
    "publish.copied": "store: rows were copied to a fresh page, nothing refers to it",
}
"""Point -> where it is and what holds there. The context names owner and branch, or the page."""

Context = dict[str, Any]
Action = Callable[[Context], object]


def allowed() -> bool:
    """Whether this process was started for failure injection."""
    return os.environ.get(ENV_FAULTS) == "1"


@dataclass(slots=True)
class Fault:
    """One armed fault; `hits` counts how often its action ran."""

    point: str
    action: Action
    when: Callable[[Context], bool] | None = None  # None: every visit counts
    skip: int = 0  # matching visits that pass unharmed first
    times: int | None = 1  # how often it acts; None: every time
    hits: int = 0


_armed: list[Fault] | None = None


def reach(point: str, **context: Any) -> None:
    """Mark that `point` is reached; raises what an armed fault raises."""
    if _armed is not None:
        _visit(point, context)


def arm(
    point: str,
    action: Action,
    *,
    when: Callable[[Context], bool] | None = None,
    skip: int = 0,
    times: int | None = 1,
) -> Fault:
    """Arm a fault until `disarm`. Raises InvalidStateRequest for a point that is not in POINTS."""
    global _armed
    if point not in POINTS:
        raise InvalidStateRequest(f"unknown fault point {point!r}; known: {sorted(POINTS)}")
    fault = Fault(point, action, when, skip, times)
    _armed = [*(_armed or []), fault]
    return fault


def disarm(fault: Fault | None = None) -> None:
    """Disarm one fault, or all of them."""
    global _armed
    _armed = [other for other in _armed or [] if fault is not None and other is not fault] or None


@contextmanager
def armed(
    point: str,
    action: Action,
    *,
    when: Callable[[Context], bool] | None = None,
    skip: int = 0,
    times: int | None = 1,
) -> Iterator[Fault]:
    """`arm` for the length of a block."""
    fault = arm(point, action, when=when, skip=skip, times=times)
    try:
        yield fault
    finally:
        disarm(fault)


def raising(error: BaseException) -> Action:
    """An action that raises `error`."""

    def act(context: Context) -> None:
        raise error

    return act


def not_finite(context: Context, value: float = float("nan")) -> None:
    """An action for `write.candidate`: the block's V becomes NaN (or another value)."""
    context["values"][..., context["index"], :, :] = value


def kill(context: Context) -> None:
    """An action that ends this process at once, as the kernel's OOM killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def _visit(point: str, context: Context) -> None:
    for fault in list(_armed or ()):
        if fault.point != point or (fault.when is not None and not fault.when(context)):
            continue
        if fault.skip:
            fault.skip -= 1
        elif fault.times is None or fault.hits < fault.times:
            fault.hits += 1
            fault.action(context)
