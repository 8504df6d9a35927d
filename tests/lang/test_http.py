"""The HTTP transport against real sockets."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_rwttt import (
    InvalidStateRequest,
    ReadOnlyState,
    Runtime,
    ServerGone,
    StaleVersion,
    StateCapacity,
    StateError,
    UnknownOwner,
    assistant,
    function,
    gen,
    user,
)
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.http import HttpTransport
from sgl_rwttt.lang.state import State

from .conftest import check_text
from .fake_http import FakeHttp
from .fake_transport import FakeServer
from .test_programs import PROGRAMS

pytestmark = pytest.mark.timeout(60)
GREEDY = [program for program in PROGRAMS if program.__name__ != "best_of"]


@pytest.fixture
def http(server: FakeServer) -> Iterator[FakeHttp]:
    with FakeHttp(server) as running:
        yield running


@pytest.fixture
def runtime(http: FakeHttp, tokenizer_path: Path) -> Iterator[Runtime]:
    made = Runtime(http.url, tokenizer_path=str(tokenizer_path), api_key="secret")
    yield made
    made.shutdown()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("program", GREEDY, ids=lambda p: p.__name__)
def test_http_and_in_process_give_equal_ids(
    program: Any, stream: bool, runtime: Runtime, backend: StateBackend
) -> None:
    """Two backends that lower differently would give two states for one program."""
    here = function(program).run(backend=backend, temperature=0)
    there = function(program).run(backend=runtime, temperature=0, stream=stream)
    "".join(there.text_iter())
    assert there.tokens == here.tokens
    assert there.state_id == here.state_id
    check_text(there)


def test_key_is_sent_and_pool_is_shared(http: FakeHttp, runtime: Runtime) -> None:
    """Every route needs the key; a connection per request would exhaust ports."""

    @function
    def program(s: State) -> None:
        for i in range(20):
            s += user("Q") + assistant(gen(f"a{i}", max_tokens=2))

    program.run(backend=runtime)
    assert set(http.headers) == {"Bearer secret"}
    assert len(http.connections) <= 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_errors_keep_their_type(stream: bool, server: FakeServer, runtime: Runtime) -> None:
    """On /generate the type travels inside SGLang's message."""
    server.failures.append(StateCapacity("no pages: raise --ttt-memory-mb", owner="o", version=2))

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a")
        s.sync()

    with pytest.raises(StateCapacity, match="--ttt-memory-mb") as caught:
        s = program.run(backend=runtime, stream=stream)
        list(s.text_iter())
    assert (caught.value.owner, caught.value.version) == ("o", 2)


def test_control_errors_keep_their_type(runtime: Runtime) -> None:
    """On /ttt the body is the wire form."""
    with pytest.raises(UnknownOwner):
        runtime.transport.control("close", {"owner": "nobody"})


def test_plain_sglang_errors_are_state_errors(server: FakeServer, runtime: Runtime) -> None:
    """Whatever else SGLang refuses must reach the program as it stands."""
    server.failures.append(StateError("x"))
    server.failures[0].to_header = lambda: "The input is too long"  # type: ignore[method-assign]
    with pytest.raises(StateError, match="too long"):
        function(lambda s: s.__iadd__("Q" + gen("a")) and None).run(backend=runtime)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_killed_server(stream: bool, server: FakeServer, http: FakeHttp, runtime: Runtime) -> None:
    """SIGKILL in the middle of a gen: ServerGone within a second, and again at every later use."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.sync()
        server.delay = 30
        threading.Timer(0.2, http.kill).start()
        s += gen("b")
        started = time.monotonic()
        with pytest.raises(ServerGone):
            s["b"]
        assert time.monotonic() - started < 1.5
        with pytest.raises(ServerGone):
            s += "more"
        server.is_dead = True

    state = program.run(backend=runtime, stream=stream)
    list(state.text_iter("a"))
    state.error()


def test_no_server() -> None:
    """Nobody listens: an error that names the address, at once."""
    started = time.monotonic()
    with pytest.raises(ServerGone, match=r"127\.0\.0\.1:9"):
        Runtime("http://127.0.0.1:9")
    assert time.monotonic() - started < 2


def test_tokenizer_of_a_remote_model(http: FakeHttp) -> None:
    """The model path is the server's; without the files here the client must say what to do."""
    with pytest.raises(InvalidStateRequest, match="tokenizer_path="):
        Runtime(http.url)


def test_types_cross_the_wire(http: FakeHttp, server: FakeServer) -> None:
    """Each error class comes back as itself."""
    transport = HttpTransport(http.url)
    for kind in (StaleVersion, ReadOnlyState, StateCapacity, InvalidStateRequest):
        server.failures.append(kind("why not"))
        with pytest.raises(kind, match="why not"):
            transport.generate({"rid": "r", "input_ids": [1]})
    transport.close()
