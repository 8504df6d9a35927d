"""run, run_batch, arun, streaming."""

import asyncio
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import sgl_rwttt
from sgl_rwttt import ProgramFailed, StateCapacity, assistant, function, gen, user
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.state import State
from sgl_rwttt.lang.steps import Arrivals

from .fake_transport import FakeServer

pytestmark = pytest.mark.timeout(60)


@function
def ask(s: State, q: str, fails: bool = False) -> str:
    s += user(q) + assistant(gen("a", max_tokens=3))
    if fails:
        raise ProgramFailed(q)
    return q


def test_import_costs_nothing() -> None:
    """Importing the package must not import torch, SGLang or a model library."""
    code = (
        "import sys, sgl_rwttt; sgl_rwttt.__version__; dir(sgl_rwttt);"
        "heavy = {'torch', 'sglang', 'transformers', 'numpy'} & set(sys.modules);"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_public_names_exist() -> None:
    """A lazy name that does not resolve is found by users first."""
    for name in sgl_rwttt.__all__:
        assert getattr(sgl_rwttt, name) is not None
    with pytest.raises(AttributeError):
        sgl_rwttt.nothing  # noqa: B018


@pytest.mark.parametrize("use_thread", [True, False])
def test_threads_make_no_difference(use_thread: bool, backend: StateBackend) -> None:
    """The same lineage with and without a worker thread."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=3)
        with s.fork(2) as branches:
            branches += gen("b", max_tokens=3)
            s.keep(branches[1])
        s.checkpoint()
        s += gen("c", max_tokens=3)
        s.rollback()

    s = program.run(backend=backend, temperature=0, use_thread=use_thread)
    again = program.run(backend=backend, temperature=0)
    assert s.state_id == again.state_id


def test_run_arguments(backend: StateBackend, server: FakeServer) -> None:
    """Program arguments, bound ones, sampling defaults and the default backend."""
    sgl_rwttt.set_default_backend(backend)
    try:
        assert ask.run("one").ret_value == "one"
        assert ask("two").ret_value == "two"
        assert ask.bind(q="three").run(temperature=0, max_new_tokens=5).ret_value == "three"
        assert server.log[-2][1]["sampling_params"]["temperature"] == 0
        with pytest.raises(TypeError):
            ask.bind(r=1)

        @function
        def own(s: State, temperature: str) -> str:
            return temperature

        assert own.run(temperature="warm").ret_value == "warm"
    finally:
        sgl_rwttt.set_default_backend(None)


def test_batch_keeps_order_and_the_others(backend: StateBackend, server: FakeServer) -> None:
    """Stock: one failing program loses the whole batch."""
    rows: list[Any] = [{"q": str(i), "fails": i == 3} for i in range(12)]
    results = ask.run_batch(rows, backend=backend, on_error="return", progress_bar=True)
    assert [type(r) for r in results] == [State] * 3 + [ProgramFailed] + [State] * 8
    assert [r.ret_value for r in results if isinstance(r, State)] == [
        str(i) for i in range(12) if i != 3
    ]
    assert not server.sessions
    with pytest.raises(ProgramFailed, match="3"):
        ask.run_batch(rows, backend=backend)
    assert [s.ret_value for s in ask.run_batch([("x",), ["y"], "z"], backend=backend)] == [
        "x",
        "y",
        "z",
    ]
    assert ask.run_batch([], backend=backend) == []
    with pytest.raises(TypeError):
        ask.run_batch([("x", True, 3)], backend=backend)


def test_batch_runs_side_by_side(backend: StateBackend, server: FakeServer) -> None:
    """The server can only batch what is asked at one time."""
    server.delay = 0.2
    started = time.monotonic()
    ask.run_batch([(str(i),) for i in range(16)], backend=backend)
    assert time.monotonic() - started < 1.5


def test_stream(backend: StateBackend, server: FakeServer) -> None:
    """The pieces make up the whole, in order, and the run ends by itself."""
    server.say("The model reads", "The model writes STOP here")

    @function
    def program(s: State) -> str:
        s += user("Q") + assistant(gen("a", max_tokens=30))
        s += user("R") + assistant(gen("b", max_tokens=30, stop="STOP"))
        return "done"

    s = program.run(backend=backend, stream=True)
    pieces = list(s.text_iter("a"))
    assert "".join(pieces) == "The model reads" == s["a"]
    assert len(pieces) >= 1
    assert "".join(s.text_iter("b")) == "The model writes "
    assert "".join(s.text_iter()) == s.text()
    assert s.ret_value == "done"
    assert not server.sessions


def test_stream_error_is_raised_at_its_end(backend: StateBackend, server: FakeServer) -> None:
    """A stream that just stops looks like a short answer."""
    server.failures.append(StateCapacity("no pages"))
    s = ask.run("Q", backend=backend, stream=True)
    with pytest.raises(StateCapacity):
        list(s.text_iter("a"))
    with pytest.raises(StateCapacity):
        s["a"]
    s = ask.run("Q", fails=True, backend=backend, stream=True)
    with pytest.raises(ProgramFailed):
        list(s.text_iter())


def test_stream_waits_for_a_name_not_yet_said(backend: StateBackend) -> None:
    """The caller's thread is ahead of the program's: a missing name is not yet an error."""

    @function
    def program(s: State) -> None:
        time.sleep(0.2)
        s += "Q" + gen("late", max_tokens=2)

    s = program.run(backend=backend, stream=True)
    assert s["late"]
    with pytest.raises(KeyError):
        s["never"]


def test_async(backend: StateBackend) -> None:
    """arun leaves the loop free, also for many more runs than the default executor has threads."""

    async def main() -> list[str]:
        states = await asyncio.gather(*(ask.arun(str(i), backend=backend) for i in range(40)))
        streamed = await ask.arun("Q", backend=backend, stream=True)
        parts = [part async for part in streamed.text_async_iter("a")]
        assert "".join(parts) == streamed["a"]
        pairs = [
            pair
            async for pair in (await ask.arun("Q", backend=backend, stream=True)).text_async_iter(
                "a", return_meta_data=True
            )
        ]
        assert all("completion_tokens" in meta for _, meta in pairs)
        return [s.ret_value for s in states]

    assert asyncio.run(main()) == [str(i) for i in range(40)]


def test_arrivals() -> None:
    """The reader of a name wakes for the last of its queued uses, not the first."""
    event = Arrivals()
    assert event.is_set()
    event.expect()
    event.expect()
    event.set()
    assert not event.wait(0.01)
    threading.Timer(0.05, event.set).start()
    assert event.wait(5)
    event.set()
    assert event.is_set()
