"""fork, checkpoint and rollback right after a fill, while requests take their time.

Stock fork tests the text before it syncs: right after a fill it committed the fill 0 of 500 times.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sgl_rwttt import function, gen
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.state import State

from .fake_transport import FakeServer, Json

RUNS = 1000


class SlowServer(FakeServer):
    """Each request takes a random time below a third of a millisecond."""

    def generate(self, payload: Json) -> Iterator[Json]:
        self.delay = random.random() / 3000
        return super().generate(payload)


@pytest.fixture
def server() -> FakeServer:
    return SlowServer()


def said(server: FakeServer, s: State) -> str:
    """What the server has read at the end of a branch."""
    node = server.sessions[s.owner].nodes[s.branch or ""]
    return str(server.tokenizer.decode(node.tokens))


@function
def fill_then_fork(s: State, server: FakeServer, n: int) -> None:
    s += "A state "
    with s.fork(n) as branches:
        branches += "reads. "
        for branch in branches:
            branch.flush()
            assert said(server, branch) == "A state reads. "
    assert said(server, s) == "A state "


def test_children_see_the_fill_exactly_once(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a fork that overtakes the fill before it, or children that read it again."""
    for i in range(RUNS):
        fill_then_fork.run(server=server, n=3 if i % 20 == 0 else 1, backend=backend)
    sent = [p["input_ids"] for op, p in server.log if op == "generate"]
    fill = backend.text.encode("A state ", at_root=True)
    assert sent.count(fill) == RUNS, "the parent reads it, once a run"
    assert len(sent) == RUNS + RUNS + 2 * RUNS // 20


def nested(s: State) -> None:
    for i in range(4):
        s += f"{i} "
        with s.fork(2) as outer:
            for branch in outer:
                branch += "one "
                with branch.fork(2) as inner:
                    inner += ["x ", "y "]
                    branch.keep(inner[1])
            s.keep(outer[0])
    assert s.text() == "0 one y 1 one y 2 one y 3 one y "


def checkpoint_after_fill(s: State) -> None:
    for i in range(8):
        s += f"{i} "
        here = s.checkpoint()
        assert (s.pending, here.position) == ("", s.position)
        s += "dropped"
        s.rollback(here)
    assert s.text() == "0 1 2 3 4 5 6 7 "


def rollback_after_fill(s: State) -> None:
    s += "kept "
    s.checkpoint()
    for i in range(8):
        s += f"{i} dropped" if i % 2 else "dropped " + gen("a", max_tokens=2)
        s.rollback()
        assert (s.text(), s.pending) == ("kept ", "")


def fork_at_after_a_freeze(s: State) -> None:
    s += "kept "
    s.checkpoint("here")
    for _ in range(8):
        s += gen("a", max_tokens=3)
        s.freeze()
        with s.fork(1, at="here") as branches:
            assert branches[0].mode == "read"
        s.unfreeze()
        s += gen("b", max_tokens=3)
        with s.fork(1, at="here") as branches:
            assert branches[0].mode == "write"


def keep_after_a_freeze(s: State) -> None:
    s += "kept"
    for _ in range(8):
        with s.fork(1) as branches:
            branches += " written"
            s += gen("a", max_tokens=3)
            s.freeze()
            s.keep(branches[0])
            s.unfreeze()
        s.flush()
    assert {mode for *_, mode in s.lineage.modes} == {"write"}


PROGRAMS: list[Any] = [
    nested,
    checkpoint_after_fill,
    rollback_after_fill,
    fork_at_after_a_freeze,
    keep_after_a_freeze,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_right_after_a_fill(program: Any, backend: StateBackend) -> None:
    """Guards: a verb that looks at a branch whose queue still runs."""
    for _ in range(10):
        s = function(program).run(backend=backend, temperature=0)
        assert backend.text.decode(s.tokens) + s.pending == s.text()
        time.sleep(random.random() / 3000)
