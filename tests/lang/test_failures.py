"""Errors are typed, stick to their branch, are raised at the next use, and never hang."""

import threading
import time
from typing import Any

import pytest

from sgl_rwttt import (
    InvalidStateRequest,
    LedgerMismatch,
    OwnerReleased,
    ProgramFailed,
    ServerGone,
    StaleVersion,
    StateCapacity,
    StateError,
    assistant,
    function,
    gen,
    image,
    user,
)
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.state import State

from .fake_transport import FakeServer

pytestmark = pytest.mark.timeout(30)


def test_a_dead_branch_raises_and_does_not_hang(server: FakeServer, backend: StateBackend) -> None:
    """Stock: after a worker error later sync() calls wait for ever."""
    server.failures.append(StateCapacity("no pages", version=3))

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a") + gen("b")
        s += gen("c")
        for use in (
            lambda: s["a"],
            lambda: s["c"],
            lambda: s.get_meta_info("b"),
            s.text,
            s.messages,
            s.sync,
            s.checkpoint,
            lambda: s.fork(2),
            lambda: s.score("x"),
            lambda: s.state_id,
            lambda: s.__iadd__("more"),
        ):
            with pytest.raises(StateCapacity, match="no pages") as caught:
                use()
            assert caught.value.version == 3
        assert isinstance(s.error(), StateCapacity)
        assert "failed" in repr(s)

    program.run(backend=backend)


def test_an_error_nobody_looked_at_ends_the_run(server: FakeServer, backend: StateBackend) -> None:
    """A run whose last gen failed must not look like one that succeeded."""
    server.failures.append(StateCapacity("no pages"))
    with pytest.raises(StateCapacity):
        function(lambda s: s.__iadd__("Q" + gen("a")) and None).run(backend=backend)


def test_an_error_in_a_forgotten_branch_ends_the_run(
    server: FakeServer, backend: StateBackend
) -> None:
    """Also when no one joined the branch; but an error that the program handled does not."""

    @function
    def program(s: State, looks: bool) -> str:
        s += "Q"
        s.flush()
        server.failures.append(StateCapacity("no pages"))
        branches = s.fork(1)
        branches += gen("a")
        if looks:
            with pytest.raises(StateCapacity):
                branches[0].sync()
        s += gen("b", max_tokens=2) if looks else ""
        return "done"

    assert program.run(looks=True, backend=backend).ret_value == "done"
    with pytest.raises(StateCapacity):
        program.run(looks=False, backend=backend)


def test_old_value_is_not_returned_for_a_failed_gen(
    server: FakeServer, backend: StateBackend
) -> None:
    """s["a"] after a failed second gen("a") must raise, not give the first answer."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.sync()
        server.failures.append(StateCapacity("no pages"))
        s += gen("a", max_tokens=2)
        with pytest.raises(StateCapacity):
            s["a"]

    program.run(backend=backend)


def test_a_variable_set_twice_is_the_second(server: FakeServer, backend: StateBackend) -> None:
    """Stock wakes the reader when the first of two queued gens of one name is done."""
    server.delay = 0.05
    server.say("one", "two")

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s += gen("a", max_tokens=2)
        assert s["a"] == "two"[: len(s["a"])]

    program.run(backend=backend)


def test_server_gone_mid_program(server: FakeServer, backend: StateBackend) -> None:
    """A lost server is ServerGone at once, in every branch, and at the end of the run."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.sync()
        branches = s.fork(3)
        server.is_dead = True
        branches += gen("b")
        for branch in branches:
            with pytest.raises(ServerGone):
                branch.sync()
        s += gen("c")

    started = time.monotonic()
    with pytest.raises(ServerGone):
        program.run(backend=backend)
    assert time.monotonic() - started < 1


def test_restarted_server_is_gone(server: FakeServer, backend: StateBackend) -> None:
    """After a restart the session is merely unknown: the boot id says why."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.sync()
        server.boot()
        s += gen("b")

    with pytest.raises(ServerGone, match="restarted"):
        program.run(backend=backend)


def test_ledger_mismatch(server: FakeServer, backend: StateBackend) -> None:
    """A server that consumed other tokens than we believe must not be continued."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.sync()
        node = server.sessions[s.owner].nodes[s.branch or ""]
        wrong_report = server.clock

        def clock(root: str, number: int, tokens: list[int], modes: Any) -> Any:
            server.clock = wrong_report  # type: ignore[method-assign]
            return wrong_report(root, number, [*tokens, 5], [*modes, node.modes[0]])

        s += "R"
        s.sync()
        admit = server.admit

        def admitted(payload: Any) -> Any:
            result = admit(payload)
            server.clock = clock  # type: ignore[method-assign]
            return result

        server.admit = admitted  # type: ignore[method-assign]
        with pytest.raises(LedgerMismatch, match="position"):
            s.flush()

    program.run(backend=backend)


def test_stale_version(server: FakeServer, backend: StateBackend) -> None:
    """A parent whose tokens changed behind our back is caught by ttt_expect."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.sync()
        server.sessions[s.owner].nodes[s.branch or ""].tokens[0] += 1
        s += "R" + gen("b")

    with pytest.raises(StaleVersion):
        program.run(backend=backend)


def test_programs_own_exception(server: FakeServer, backend: StateBackend) -> None:
    """It reaches the caller, what is queued is not run, and the owner is freed."""

    @function
    def program(s: State) -> None:
        s += user("Q")
        server.delay = 0.1
        for _ in range(50):
            s += assistant(gen("a", max_tokens=2))
        raise ProgramFailed("no passing answer")

    started = time.monotonic()
    with pytest.raises(ProgramFailed):
        program.run(backend=backend)
    assert time.monotonic() - started < 2
    assert not server.sessions


def test_after_the_run(server: FakeServer, backend: StateBackend) -> None:
    """Results stay readable, the state does not move any more; with keep it does."""
    program = function(lambda s: s.__iadd__("Q" + gen("a", max_tokens=2)) and None)
    s = program.run(backend=backend)
    assert s["a"] and s.text() and s.tokens and s.state_id and s.version >= 0
    for use in (lambda: s.__iadd__("R"), lambda: s.fork(1), s.checkpoint, lambda: s.owner):
        with pytest.raises(OwnerReleased):
            use()
    s.release()

    kept = program.run(backend=backend, keep=True)
    kept += gen("b", max_tokens=2)
    assert kept["b"] and server.sessions
    kept.release()
    kept.release()
    assert not server.sessions
    with pytest.raises(OwnerReleased):
        kept += "R"


def test_a_forgotten_kept_state_is_freed(server: FakeServer, backend: StateBackend) -> None:
    """A kept state that nobody refers to must not hold its pages until the server stops."""
    program = function(lambda s: s.__iadd__("Q" + gen("a", max_tokens=2)) and None)
    program.run(backend=backend, keep=True)
    deadline = time.monotonic() + 5
    while server.sessions and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server.sessions


def test_no_threads_are_left(backend: StateBackend) -> None:
    """Every branch has a worker: none may outlive its run."""

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(3) as branches:
            branches += gen("a", max_tokens=2)
        s.fork(2)

    program.run(backend=backend)
    names = [t.name for t in threading.enumerate() if t.name.startswith("sgl_rwttt branch")]
    assert not names


@pytest.mark.parametrize(
    ("expr", "message"),
    [
        (gen("a", n=2), r"s\.fork\(2\)"),
        ("Q" + gen("a", n=3), r"s\.fork\(3\)"),
        (image("x.png"), "images"),
    ],
)
def test_refused_expressions(expr: Any, message: str, backend: StateBackend) -> None:
    """What sglang.lang can say and a state cannot do is refused with what to say instead."""
    with pytest.raises(InvalidStateRequest, match=message):
        function(lambda s: s.__iadd__(expr) and None).run(backend=backend)


def test_refused_arguments(backend: StateBackend) -> None:
    """Nonsense is refused before anything is asked of the server."""
    program = function(lambda s: None)
    with pytest.raises(InvalidStateRequest, match="fork"):
        program.run(n=2, backend=backend)
    with pytest.raises(InvalidStateRequest, match="on_error"):
        program.run_batch([{}], on_error="ignore", backend=backend)
    with pytest.raises(TypeError, match="cannot carry state"):
        program.run(backend=object())
    for bad in (
        lambda s: s.fork(0),
        lambda s: s.adapt(""),
        lambda s: s.adapt("x", epochs=0),
        lambda s: s.adapt("x", context="drop"),
        lambda s: s.clear_context(tail="keep"),
        lambda s: s.score(""),
        lambda s: s.__iadd__(gen("a")),
    ):
        with pytest.raises(InvalidStateRequest):
            function(bad).run(backend=backend)
    with pytest.raises(StateError):
        function(lambda s: s.__iadd__("Q" + gen("a", dtype=bytes)) and None).run(backend=backend)
