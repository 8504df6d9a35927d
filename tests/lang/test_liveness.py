"""Leases, and servers that end or fall silent in the middle of each verb."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sgl_rwttt import (
    InvalidStateRequest,
    OwnerReleased,
    Runtime,
    ServerGone,
    StateError,
    function,
    gen,
    select,
)
from sgl_rwttt.lang import StateBackend, http, liveness
from sgl_rwttt.lang.lease import Lease
from sgl_rwttt.lang.owner import Owner
from sgl_rwttt.lang.state import State

from .fake_http import FakeHttp
from .fake_transport import FakeServer, FakeTransport

pytestmark = pytest.mark.timeout(60)


def until(condition: Callable[[], Any]) -> None:
    """The test's own time-out ends it when the condition never comes."""
    while not condition():
        time.sleep(0.005)


def threads(name: str) -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == f"sgl_rwttt {name}"]


# Leases


@pytest.fixture
def leased(server: FakeServer) -> Iterator[StateBackend]:
    made = StateBackend(FakeTransport(server), lease_s=0.09)
    yield made
    made.shutdown()


def renewed(server: FakeServer) -> list[list[str]]:
    return [args["owners"] for op, args in server.log if op == "renew"]


def test_open_owners_are_renewed_in_one_request(server: FakeServer, leased: StateBackend) -> None:
    """An owner that works locally for longer than its lease would be closed under it."""

    @function
    def program(s: State) -> None:
        others = [Owner(leased.transport, leased.lease) for _ in range(3)]
        owners = sorted([s.owner, *(other.id for other in others)])
        assert all(session.timeout == 0.09 for session in server.sessions.values())
        until(lambda: owners in [sorted(names) for names in renewed(server)])
        others.pop().close()
        until(lambda: len(renewed(server)[-1]) == 3)
        assert len(threads("lease")) == 1
        for other in others:
            other.close()
        until(lambda: renewed(server)[-1] == [s.owner])

    program.run(backend=leased)
    until(lambda: not threads("lease"))  # nobody wakes for nothing
    assert not server.sessions


def test_an_expired_owner_is_released(server: FakeServer, leased: StateBackend) -> None:
    """What the server closed is said at the next use, with the reason."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.sync()
        executor = s.stream_executor
        server.control("close", {"owner": s.owner})
        until(lambda: executor.owner.error)
        s += gen("b")
        with pytest.raises(OwnerReleased, match=r"lease of 0\.09 s"):
            s.sync()

    program.run(backend=leased)


def test_a_restart_is_found_by_the_renewal(server: FakeServer, leased: StateBackend) -> None:
    """The ids of the old server mean nothing to the new one."""

    @function
    def program(s: State) -> None:
        s += "Q"
        s.flush()
        server.boot()
        until(lambda: s.stream_executor.owner.error)
        s += gen("b")

    with pytest.raises(ServerGone, match="restarted"):
        program.run(backend=leased)


def test_renewals_survive_a_pause_of_the_server(server: FakeServer, leased: StateBackend) -> None:
    """A renewal that fails must not be the last."""

    @function
    def program(s: State) -> None:
        s += "Q"
        s.flush()
        server.is_dead = True
        time.sleep(0.1)
        server.is_dead = False
        count = len(renewed(server))
        until(lambda: len(renewed(server)) > count + 1)

    program.run(backend=leased)


def test_many_owners_are_renewed_in_parts(server: FakeServer) -> None:
    """The server takes a list of 1000."""
    lease = Lease(0.03, server.control)
    owners = [Owner(FakeTransport(server), lease) for _ in range(1003)]
    assert len({owner.id for owner in owners}) == 1003
    seen = len(renewed(server)) + 1
    until(lambda: len(renewed(server)) > seen + 1)
    assert sorted(map(len, renewed(server)[seen : seen + 2])) == [3, 1000]
    for owner in owners:
        owner.close()
    lease.close()


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_a_lease_is_positive(seconds: float, server: FakeServer) -> None:
    """0 is not "no lease"."""
    with pytest.raises(InvalidStateRequest, match="lease_s"):
        StateBackend(FakeTransport(server), lease_s=seconds)


def test_without_a_lease(server: FakeServer, backend: StateBackend) -> None:
    """The server's own time-out holds for those who don't ask."""

    @function
    def program(s: State) -> None:
        assert server.sessions[s.owner].timeout is None

    until(lambda: not threads("lease"))
    program.run(backend=backend, keep=True).release()
    assert not threads("lease")


# Servers that end


@pytest.fixture
def fake_http(server: FakeServer) -> Iterator[FakeHttp]:
    with FakeHttp(server) as running:
        yield running


@pytest.fixture
def runtime(fake_http: FakeHttp, tokenizer_path: Path) -> Iterator[Runtime]:
    made = Runtime(fake_http.url, tokenizer_path=str(tokenizer_path), lease_s=0.3)
    yield made
    made.shutdown()


def fork(s: State) -> None:
    with s.fork(3) as branches:
        branches += gen("b", max_tokens=2)
        for branch in branches:
            branch.sync()


def roll_back(s: State) -> None:
    s.rollback()
    s += "more" + gen("b", max_tokens=2)
    s.sync()


def in_sync(*parts: Any) -> Callable[[State], None]:
    def use(s: State) -> None:
        for part in parts:
            s.__iadd__(part)
        s.sync()

    return use


def is_verb(op: str) -> Callable[[str, Any], bool]:
    return lambda path, body: path == f"/ttt/{op}"


def asks(path: str, body: Any) -> bool:
    return path == "/generate"


USES: dict[str, tuple[Callable[[str, Any], bool], Callable[[State], Any]]] = {
    "gen": (asks, in_sync(gen("b", max_tokens=4))),
    "select": (asks, in_sync("which", select("b", ["x", "y"]))),
    "flush": (asks, lambda s: (s.__iadd__("more"), s.flush())),
    "fork": (asks, lambda s: (s.__iadd__("more"), s.fork(2))),
    "branches": (asks, fork),
    "checkpoint": (asks, lambda s: (s.__iadd__("more"), s.checkpoint())),
    "rollback": (asks, roll_back),
    "score": (asks, lambda s: s.score("more")),
    "clear": (asks, lambda s: (s.clear_context(), s.sync())),
    "adapt": (asks, lambda s: (s.adapt("a text longer than a chunk of eight tokens"), s.sync())),
    "snapshot": (is_verb("save"), lambda s: s.snapshot("file")),
    "restore": (is_verb("restore"), lambda s: s.restore("file")),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("verb", USES)
def test_a_server_killed_during(
    verb: str, stream: bool, server: FakeServer, fake_http: FakeHttp, runtime: Runtime
) -> None:
    """Each verb has its own way to wait; each must end with the connection."""
    dies_at, use = USES[verb]

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.checkpoint()
        fake_http.dies_at = dies_at
        with pytest.raises(ServerGone):
            use(s)
        with pytest.raises(ServerGone):
            in_sync(gen("c"))(s)

    state = program.run(backend=runtime, stream=stream)
    list(state.text_iter("a"))
    until(lambda: state.stream_executor.is_over)
    if isinstance(state.error(), AssertionError):
        raise AssertionError from state.error()
    server.is_dead = True


def close_and_go(s: State, fake_http: FakeHttp) -> None:
    pass  # the run's end closes the owner


def drop(s: State, fake_http: FakeHttp) -> None:
    with s.fork(1) as branches:
        branches += gen("b", max_tokens=2)
        branches[0].sync()


def release_root(s: State, fake_http: FakeHttp) -> None:
    with suppress(ServerGone):  # of the request behind it
        for _ in range(3):
            s.clear_context()
            s += "Q"
            s.flush()


def renew(s: State, fake_http: FakeHttp) -> None:
    until(fake_http.ended.is_set)


def abort(s: State, fake_http: FakeHttp) -> None:
    with pytest.raises(KeyError), s.fork(1) as branches:
        asked = len(fake_http.headers)
        fake_http.server.delay = 600
        branches += gen("b", max_tokens=2)
        until(lambda: len(fake_http.headers) > asked)
        raise KeyError
    until(fake_http.ended.is_set)


@pytest.mark.parametrize(
    "op, use",
    [
        ("close", close_and_go),
        ("drop", drop),
        ("release_root", release_root),
        ("renew", renew),
        ("abort", abort),
    ],
)
def test_a_server_killed_during_housekeeping(
    op: str, use: Callable[[State, FakeHttp], None], fake_http: FakeHttp, runtime: Runtime
) -> None:
    """Nobody asked for these: they raise nothing, and the next thing that was asked for does."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.sync()
        fake_http.dies_at = is_verb(op)
        use(s, fake_http)
        if op != "close":
            assert fake_http.ended.is_set()
            with pytest.raises(ServerGone):
                in_sync(gen("c"))(s)

    program.run(backend=runtime)
    assert fake_http.ended.is_set()


def test_a_server_killed_while_it_opens_an_owner(fake_http: FakeHttp, runtime: Runtime) -> None:
    """The first request of a run is no request of the model."""
    fake_http.dies_at = is_verb("open")
    with pytest.raises(ServerGone):
        function(lambda s: (s.__iadd__("Q"), s.flush())).run(backend=runtime)


def test_a_stream_cut_short(server: FakeServer, fake_http: FakeHttp, runtime: Runtime) -> None:
    """A connection that closes between two events looks like the end of a short answer."""
    grow = server.generate

    def cut(payload: Any) -> Iterator[Any]:
        items = grow(payload)
        yield next(items)
        fake_http.kill()
        yield from items

    server.generate = cut  # type: ignore[method-assign]
    s = function(lambda s: s.__iadd__("Q" + gen("a", max_tokens=9)) and None).run(
        backend=runtime, stream=True
    )
    with pytest.raises(ServerGone):
        list(s.text_iter("a"))


# Servers that fall silent


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "SILENCE_S", 0.1)
    monkeypatch.setattr(liveness, "PROBES", 2)
    monkeypatch.setattr(http, "PROBE_S", 0.2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_frozen_server(stream: bool, fake_http: FakeHttp, runtime: Runtime) -> None:
    """A stopped process keeps its connections open: nothing but a missing answer tells."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.sync()
        fake_http.frozen.set()
        s += gen("b", max_tokens=2)
        with pytest.raises(ServerGone, match="no sign of life"):
            s["b"]
        with pytest.raises(ServerGone, match="no sign of life"):
            runtime.transport.control("open", {})

    state = program.run(backend=runtime, stream=stream)
    until(lambda: state.stream_executor.is_over)
    assert isinstance(state.error(), ServerGone)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_busy_server_is_not_gone(stream: bool, server: FakeServer, runtime: Runtime) -> None:
    """A long prefill is silent too, but the server's front answers."""
    server.delay = 1.5
    s = function(lambda s: s.__iadd__("Q" + gen("a", max_tokens=2)) and None).run(
        backend=runtime, stream=stream
    )
    assert s["a"]
    until(lambda: s.stream_executor.is_over)


@pytest.mark.usefixtures("impatient")
def test_the_watch_ends_with_the_calls(runtime: Runtime) -> None:
    """A thread per Runtime that wakes for ever is a leak."""
    runtime.transport.info()
    until(lambda: not threads("watch"))


def test_a_server_behind_a_proxy(fake_http: FakeHttp, runtime: Runtime) -> None:
    """A proxy answers for a server that is not there."""

    class Answer:
        status_code, text = 502, "<html>Bad Gateway</html>"

        def json(self) -> Any:
            raise ValueError

    transport: Any = runtime.transport
    with pytest.raises(ServerGone, match="502"):
        transport._raise_for(Answer())
    Answer.status_code = 500
    with pytest.raises(StateError, match="500"):
        transport._raise_for(Answer())
