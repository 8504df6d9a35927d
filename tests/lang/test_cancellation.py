"""Cancelled runs: nobody waits for them, nothing of them goes on, nothing of them is left."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sgl_rwttt import OwnerReleased, ProgramFailed, StateCapacity, StateError, function, gen
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.cancellation import Cancellation
from sgl_rwttt.lang.owner import Owner
from sgl_rwttt.lang.state import State
from sgl_rwttt.lang.worker import BranchWorker

from .fake_transport import FakeServer
from .test_liveness import threads, until

pytestmark = pytest.mark.timeout(30)
FOREVER = 1e6  # seconds that the server takes for a request: a test that waits for it fails


@pytest.fixture(autouse=True)
def nobody_is_left() -> Iterator[None]:
    """Every thread of a run ends, also of a cancelled one."""
    yield
    for name in ("branch", "arun", "row", "cancel", "cleanup", "program"):
        until(lambda name=name: not threads(name))  # type: ignore[misc]


@function
def endless(s: State) -> None:
    s += "Q" + gen("a", max_tokens=2)
    s.sync()


# A program that raises


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_requests_of_a_failed_program_are_ended(
    stream: bool, server: FakeServer, backend: StateBackend
) -> None:
    """The caller of a program that raised would wait for generations that nobody wants."""

    @function
    def program(s: State) -> None:
        s += "Q"
        branches = s.fork(2)
        server.delay, before = FOREVER, server.asked
        branches += gen("a", max_tokens=2)
        s += gen("b", max_tokens=2)
        until(lambda: server.asked == before + 2)  # the batch of siblings counts once
        raise ProgramFailed("no")

    if stream:
        s = program.run(backend=backend, stream=True)
        with pytest.raises(ProgramFailed):
            list(s.text_iter("b"))
    else:
        with pytest.raises(ProgramFailed):
            program.run(backend=backend)
    until(lambda: not server.sessions)


def test_a_fork_left_by_an_error(server: FakeServer, backend: StateBackend) -> None:
    """Its branches' generations are ended on the server; the parent goes on at once."""

    @function
    def program(s: State) -> str:
        s += "Q"
        s.flush()
        with pytest.raises(ProgramFailed), s.fork(3) as branches:
            server.delay, before = FOREVER, server.asked
            branches += gen("b", max_tokens=2)
            until(lambda: server.asked > before)
            raise ProgramFailed("no")
        assert len(server.unwanted) == 3
        for branch in branches:
            with pytest.raises(OwnerReleased):
                branch.text()
        server.delay = 0
        s += gen("c", max_tokens=2)
        until(lambda: len(server.sessions[s.owner].nodes) == 2)
        return str(s["c"])

    assert program.run(backend=backend).ret_value


def test_an_error_of_the_others_is_not_raised_again(
    server: FakeServer, backend: StateBackend
) -> None:
    """The branches of a fork that one error ended have been heard of."""

    @function
    def program(s: State) -> str:
        s += "Q"
        with pytest.raises(StateCapacity), s.fork(2) as branches:
            server.failures += [StateCapacity("no pages"), StateCapacity("none at all")]
            branches += gen("b", max_tokens=2)
            for branch in branches:
                branch.stream_executor.drain()
            branches[0].sync()
        return "done"

    assert program.run(backend=backend).ret_value == "done"


# Whoever waits


WAITS: dict[str, Callable[[State], Any]] = {
    "variable": lambda s: s["a"],
    "sync": lambda s: s.sync(),
    "text": lambda s: s.text(),
    "meta": lambda s: s.get_meta_info("a"),
    "step": lambda s: s.flush(),
    "fork": lambda s: s.fork(2),
    "error": lambda s: (_ for _ in ()).throw(s.error() or AssertionError()),
}


@pytest.mark.parametrize("how", ["cancelled", "dead"])
@pytest.mark.parametrize("wait", WAITS)
def test_every_wait_ends(
    wait: str,
    how: str,
    server: FakeServer,
    backend: StateBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker that hangs in a request, or whose thread died, must not hold its program."""
    handle, waits = Cancellation(), threading.Event()
    go_on = threading.Event()

    def program(s: State) -> None:
        server.delay = FOREVER
        if how == "dead":
            monkeypatch.setattr(BranchWorker, "_run", die)
        s += "Q" + gen("a", max_tokens=2)
        waits.set()
        with pytest.raises(StateError, match="cancelled" if how == "cancelled" else "worker died"):
            WAITS[wait](s)
        with pytest.raises(StateError):
            s += "more"
        go_on.set()
        if how == "dead":
            monkeypatch.undo()

    def die(*_: Any) -> None:
        waits.wait()
        raise MemoryError("injected")

    runner = threading.Thread(
        target=lambda: function(program)._start(handle, backend=backend), daemon=True
    )
    runner.start()
    waits.wait()
    if how == "cancelled":
        until(lambda: server.asked)
        server.is_deaf = True
        handle.cancel()
    go_on.wait()
    server.is_deaf = False
    with server.changed:
        server.changed.notify_all()
    runner.join()
    until(lambda: not server.sessions)


def test_a_cancelled_stream_ends(server: FakeServer, backend: StateBackend) -> None:
    """The reader of a text, and of a name that will never be said."""
    server.delay = FOREVER
    s = endless.run(backend=backend, stream=True)
    until(lambda: server.asked)
    reader = threading.Thread(target=lambda: _raises(lambda: s["never"]), daemon=True)
    reader.start()
    s.stream_executor.owner.cancel()
    with pytest.raises(OwnerReleased):
        list(s.text_iter("a"))
    reader.join()


def _raises(use: Callable[[], Any]) -> None:
    with pytest.raises(KeyError):
        use()


def test_cancelled_before_it_began(server: FakeServer, backend: StateBackend) -> None:
    """A row or task that is cancelled in its queue must not open an owner."""
    handle = Cancellation()
    assert handle.cancel() is None
    with pytest.raises(OwnerReleased, match="before it began"):
        endless._start(handle, backend=backend)
    assert not server.log[1:]


def test_a_cancelled_branch_asks_nothing_more(server: FakeServer, backend: StateBackend) -> None:
    """A cancellation between two requests of one step is no answer to wait for."""
    owner = Owner(backend.transport)
    owner.stop(threading.current_thread())
    with pytest.raises(OwnerReleased), owner.asking("rid"):
        raise AssertionError("it asked")


# Ctrl-C


def interrupt_when(condition: Callable[[], Any]) -> None:
    """As Ctrl-C, once the condition holds."""

    def wait() -> None:
        until(condition)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.parametrize("use_thread", [True, False])
def test_ctrl_c_in_a_run(use_thread: bool, server: FakeServer, backend: StateBackend) -> None:
    """It is raised at once, in every way to wait, and leaves nothing on the server."""
    server.delay = FOREVER
    interrupt_when(lambda: server.asked)
    with pytest.raises(KeyboardInterrupt):
        endless.run(backend=backend, use_thread=use_thread)
    assert not server.sessions


def test_ctrl_c_at_the_end_of_a_run(server: FakeServer, backend: StateBackend) -> None:
    """The program has returned, and its last generation is still on its way."""
    server.delay = FOREVER
    interrupt_when(lambda: server.asked)
    with pytest.raises(KeyboardInterrupt):
        function(lambda s: s.__iadd__("Q" + gen("a")) and None).run(backend=backend)
    assert not server.sessions


def test_ctrl_c_in_a_batch(server: FakeServer, backend: StateBackend) -> None:
    """Rows that run are cancelled, the others never begin."""
    server.delay = FOREVER
    interrupt_when(lambda: server.asked == 4)
    with pytest.raises(KeyboardInterrupt):
        endless.run_batch([()] * 100, num_threads=4, backend=backend)
    until(lambda: not threads("row"))
    assert server.asked == 4
    assert not server.sessions


def test_a_batch_that_raises(server: FakeServer, backend: StateBackend) -> None:
    """The first failure is raised without waiting for rows that nobody will see."""
    begun: list[int] = []

    @function
    def program(s: State, i: int) -> None:
        begun.append(i)
        if i == 2:
            until(lambda: server.asked == 3)
            raise ProgramFailed(str(i))
        s += "Q" + gen("a", max_tokens=2)
        s.sync()

    server.delay = FOREVER
    with pytest.raises(ProgramFailed, match="2"):
        program.run_batch([(i,) for i in range(50)], num_threads=4, backend=backend)
    until(lambda: not threads("row"))
    assert sorted(begun) == [0, 1, 2, 3]
    assert not server.sessions


# Tasks


@pytest.mark.parametrize("how", ["cancel", "timeout", "wait_for"])
def test_a_cancelled_task(how: str, server: FakeServer, backend: StateBackend) -> None:
    """The coroutine ends at once, the program at its next use of `s`, the owner with them."""
    seen: list[BaseException] = []

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        try:
            s.sync()
        except BaseException as error:
            seen.append(error)
            raise

    async def main() -> None:
        task = asyncio.create_task(program.arun(backend=backend))
        while not server.asked:
            await asyncio.sleep(0.01)
        if how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return
        with pytest.raises(TimeoutError):
            if how == "wait_for":
                await asyncio.wait_for(task, 0.01)
            else:
                async with asyncio.timeout(0.01):
                    await task

    server.delay = FOREVER
    asyncio.run(main())
    until(lambda: seen)
    assert isinstance(seen[0], OwnerReleased)
    until(lambda: not server.sessions)


def test_many_tasks_with_tasks_inside(backend: StateBackend) -> None:
    """With a pool, 300 programs that each wait for one more would wait for its threads for ever."""
    together = threading.Barrier(300)

    @function
    def inner(s: State) -> str:
        s += "Q" + gen("a", max_tokens=2)
        return str(s["a"])

    @function
    def outer(s: State) -> str:
        together.wait()
        return str(asyncio.run(inner.arun(backend=backend, temperature=0)).ret_value)

    async def main() -> list[State]:
        return list(await asyncio.gather(*(outer.arun(backend=backend) for _ in range(300))))

    answers = {s.ret_value for s in asyncio.run(main())}
    assert len(answers) == 1


def test_a_program_that_raises_stop_iteration(backend: StateBackend) -> None:
    """A future cannot hold one: the task would wait for ever."""
    program = function(lambda s: next(iter(())))
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(program.arun(backend=backend))


def test_a_loop_that_ended_first(backend: StateBackend) -> None:
    """A program that is deaf to its cancellation does not hold its event loop."""
    go_on, begun = threading.Event(), threading.Event()

    @function
    def deaf(s: State) -> None:
        begun.set()
        go_on.wait()

    async def main() -> None:
        task = asyncio.create_task(deaf.arun(backend=backend))
        await asyncio.to_thread(begun.wait)
        task.cancel()

    asyncio.run(main())
    assert threads("arun")
    go_on.set()
