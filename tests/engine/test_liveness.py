"""Clients that go away, runs that are cancelled, and a server that is killed: the real thing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

import sgl_rwttt as rw
from sgl_rwttt import ProgramFailed, ServerGone, StateBackend, function, gen, select
from sgl_rwttt.lang.state import State
from sgl_rwttt.srt_ext.launch import fresh_environment
from tests.engine.served import request
from tests.engine.server import Server, cli, free_port, serving
from tests.lang.fake_transport import FakeServer, FakeTransport
from tests.lang.test_engine import checkpoint  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
RUNNING = 4  # --max-running-requests
# RUNNING of them fit. Greedy: sampled text would sooner or later hold a stop of the chat template.
LONG: dict[str, Any] = {"max_tokens": 1900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:  # noqa: F811
    """`sgl-rwttt serve` with room for few requests at once."""
    command = cli(
        *("serve", str(checkpoint), "--ttt-memory-mb", "64", "--max-total-tokens", "8192"),
        *("--max-running-requests", str(RUNNING)),
    )
    with serving(command, tmp_path_factory.mktemp("liveness") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def runtime(server: Server, checkpoint: Path) -> rw.Runtime:  # noqa: F811
    return rw.Runtime(server.url, tokenizer_path=str(checkpoint), lease_s=2.0)


def info(server: Server) -> dict[str, Any]:
    return server.get("/ttt/info").json()


def until(condition: Callable[[], Any]) -> None:
    """The test's own time-out ends it when the condition never comes."""
    while not condition():
        time.sleep(0.05)


def is_empty(server: Server) -> bool:
    found = info(server)
    return not found["sessions"] and not found["running"]


def ledger(server: Server) -> Any:
    """The slots in use once every memo is dropped."""
    assert server.post("/flush_cache?timeout=20").status_code == 200
    health = server.get("/ttt/health").json()
    assert health["status"] == "ok" and health["integrity_checked"]
    return health["ledger"]


@pytest.fixture
def settles(server: Server) -> Iterator[None]:
    """After the test the server holds what it held before, without anybody closing anything."""
    before = ledger(server)
    yield
    until(lambda: is_empty(server))
    assert ledger(server) == before
    assert info(server)["store"]["pins"] == info(server)["store"]["roots"] == 0


@function
def long(s: State) -> None:
    s += "Q" + gen("a", **LONG)
    s.sync()


def verb(server: Server, op: str, **args: Any) -> requests.Response:
    return server.post(f"/ttt/{op}", args)


def aborted(server: Server) -> int:
    return int(info(server)["counters"]["aborted"])


# Verbs


@pytest.mark.usefixtures("settles")
@pytest.mark.parametrize("op", ["abort", "close"])
def test_requests_that_run_wait_and_come_late(op: str, server: Server) -> None:
    """An abort that only hears of running requests leaves the others to run to their end."""
    owner, other = (verb(server, "open").json()["owner"] for _ in range(2))
    rids = [uuid.uuid4().hex for _ in range(RUNNING + 2)]
    count = aborted(server)

    def ask(rid: str, owner: str = owner) -> requests.Response:
        return server.post("/generate", request([5, 6, 7], n=400, rid=rid, owner=owner))

    with ThreadPoolExecutor(len(rids) + 1) as pool:
        stays = pool.submit(ask, rids[0] + "0", other)  # SGLang's own abort goes by prefix
        until(lambda: info(server)["running"] == 1)
        answers = [pool.submit(ask, rid) for rid in rids]
        until(lambda: len(server.get(f"/ttt/owners/{owner}").json()["branches"]) == len(rids))
        until(lambda: info(server)["running"] == RUNNING)
        late = uuid.uuid4().hex
        if op == "abort":
            done = verb(server, "abort", owner=owner, rids=[*rids, late]).json()
            assert done["aborted"] == rids
        else:
            assert verb(server, "close", owner=owner).status_code == 200
        for answer in [*answers, pool.submit(ask, late)]:
            assert answer.result().status_code == 410, answer.result().text
            assert "OwnerReleased" in answer.result().text
        assert stays.result().status_code == 200
        assert len(stays.result().json()["output_ids"]) == 400
    assert aborted(server) - count == len(rids)
    if op == "abort":
        assert server.get(f"/ttt/owners/{owner}").json()["branches"] == []
        assert ask(uuid.uuid4().hex).status_code == 200
        verb(server, "close", owner=owner)
    verb(server, "close", owner=other)


@pytest.mark.usefixtures("settles")
def test_renewals(server: Server) -> None:
    """An owner that is renewed lives, one that is not is closed, and each is named as it is."""
    kept, lost = (verb(server, "open", timeout=1.0).json() for _ in range(2))
    names = [kept["owner"], lost["owner"]]
    while verb(server, "renew", owners=[kept["owner"]]).json()["unknown"] == [] and (
        server.get("/ttt/owners").json()["count"] == 2
    ):
        time.sleep(0.2)
    answer = verb(server, "renew", owners=[*names, "0" * 32]).json()
    assert answer == {"boot_id": kept["boot_id"], "unknown": [lost["owner"], "0" * 32]}
    assert verb(server, "close", owner=kept["owner"]).status_code == 200
    for args in (
        {},
        {"owners": "x"},
        {"owners": [5]},
        {"owners": ["x"] * 1001},
        {"owners": [], "more": 1},
        {"owners": ["x" * 300]},
    ):
        refused = server.post("/ttt/renew", args)
        assert refused.status_code == 400, args
        assert refused.json()["error"]["type"] == "InvalidStateRequest"


# Programs


@pytest.mark.usefixtures("settles")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_fork_left_by_an_error(stream: bool, server: Server, runtime: rw.Runtime) -> None:
    """Generations of the branches would go on for nobody."""
    count = aborted(server)

    @function
    def program(s: State) -> None:
        s += "Q"
        with pytest.raises(ProgramFailed), s.fork(3) as branches:
            branches += gen("b", **LONG)
            until(lambda: info(server)["running"] == 3)
            raise ProgramFailed("no")
        until(lambda: info(server)["running"] == 0)
        s += gen("c", max_tokens=2)
        s.sync()

    state = program.run(backend=runtime, stream=stream)
    until(lambda: state.stream_executor.is_over)
    assert state.error() is None
    assert aborted(server) - count == 3


@pytest.mark.usefixtures("settles")
def test_ctrl_c(server: Server, runtime: rw.Runtime) -> None:
    """A run and a batch of runs, each in the middle of long generations."""

    def interrupt(running: int) -> None:
        until(lambda: info(server)["running"] == running)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    count = aborted(server)
    threading.Thread(target=interrupt, args=(1,), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        long.run(backend=runtime)
    until(lambda: is_empty(server))
    threading.Thread(target=interrupt, args=(RUNNING,), daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        long.run_batch([()] * 9, num_threads=RUNNING, backend=runtime)
    until(lambda: is_empty(server))
    assert aborted(server) - count == 1 + RUNNING


@pytest.mark.usefixtures("settles")
def test_a_cancelled_task(server: Server, runtime: rw.Runtime) -> None:
    """Its generation ends with it, not with its last token."""
    count = aborted(server)

    async def main() -> None:
        task = asyncio.create_task(long.arun(backend=runtime))
        await asyncio.to_thread(until, lambda: info(server)["running"] == 1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 0.01)
        await asyncio.to_thread(until, lambda: is_empty(server))

    asyncio.run(main())
    assert aborted(server) - count == 1


CLIENT = """
    import sys, time, sgl_rwttt as rw
    runtime = rw.Runtime(sys.argv[1], tokenizer_path=sys.argv[2], lease_s=2.0)

    @rw.function
    def program(s):
        s += "Q"
        s.checkpoint()
        branches = s.fork(2)
        branches += rw.gen("a", max_tokens=1900, ignore_eos=True, temperature=0)
        s.clear_context()
        s.sync()
        time.sleep(1000)

    program.run(backend=runtime)
"""


@pytest.mark.usefixtures("settles")
def test_a_killed_client(server: Server, checkpoint: Path) -> None:  # noqa: F811
    """Nobody closes what a killed process has opened: the lease does."""
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), server.url, str(checkpoint)]
    client = subprocess.Popen(command, env=fresh_environment())
    try:
        until(lambda: info(server)["store"]["pins"] or client.poll() is not None)
        until(lambda: info(server)["store"]["roots"] or client.poll() is not None)
        assert client.poll() is None, "the client ended by itself"
    finally:
        client.kill()
        client.wait()
    until(lambda: is_empty(server))


# The server is killed: last


def test_killed_in_every_verb(server: Server, runtime: rw.Runtime) -> None:
    """Each program is in another verb when its server dies; all hear of it, the process goes on."""
    ready, stop = threading.Barrier(8), threading.Event()

    def again(act: Callable[[State], Any]) -> rw.Program:
        @function
        def program(s: State) -> None:
            s += "Q"
            s.flush()
            ready.wait()
            while not stop.is_set():
                act(s)

        return program

    def clear(s: State) -> None:
        s.clear_context()
        s += "Q"
        s.flush()

    def branch(s: State) -> None:
        with s.fork(2) as branches:
            branches += gen("b", max_tokens=4, ignore_eos=True)
            s.keep(branches.best("b"))

    def roll_back(s: State) -> None:
        s.checkpoint()
        s += "R" + gen("b", max_tokens=2, ignore_eos=True)
        s.rollback()

    def choose(s: State) -> None:
        with s.peek() as p:
            p += select("b", ["yes", "no"])
            p.sync()

    def stream(s: State) -> None:
        list(long.run(backend=runtime, stream=True).text_iter("a"))

    acts = [clear, branch, roll_back, choose, stream, lambda s: s.score("more")]
    acts.append(lambda s: long.run(backend=runtime))  # opens, generates, closes
    with ThreadPoolExecutor(len(acts)) as pool:
        runs = [pool.submit(again(act).run, backend=runtime) for act in acts]
        ready.wait()
        time.sleep(0.5)
        os.killpg(server.process.pid, signal.SIGKILL)
        for run in runs:
            assert isinstance(run.exception(), ServerGone)
    stop.set()
    with pytest.raises(ServerGone):
        long.run(backend=runtime)
    other = StateBackend(FakeTransport(FakeServer()))
    assert function(lambda s: s.__iadd__("Q" + gen("a", max_tokens=2)) and None).run(backend=other)
    other.shutdown()
    runtime.shutdown()


# In process


SCRIPT = """
    import os, signal, sys, threading, time, sgl_rwttt as rw
    engine = rw.Engine(sys.argv[1], port=int(sys.argv[2]), ttt_memory_mb=64, max_total_tokens=4096)
    info = engine.transport.info

    def interrupt():
        while not info()["running"]:
            time.sleep(0.05)
        os.killpg(os.getpgrp(), signal.SIGINT)  # as a terminal does

    @rw.function
    def program(s, n):
        s += "Q" + rw.gen("a", max_tokens=n, ignore_eos=True, temperature=0)
        s.sync()

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        program.run(400, backend=engine)
    except KeyboardInterrupt:
        print("interrupted")
    while info()["running"] or info()["sessions"]:
        time.sleep(0.05)
    assert info()["counters"]["aborted"] == 1
    program.run(3, backend=engine)
    print("goes on")
    engine.shutdown()
"""


def test_ctrl_c_reaches_the_program_and_not_its_engine(checkpoint: Path) -> None:  # noqa: F811
    """A terminal sends it to every process of the group: the engine's would end with it."""
    script = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(checkpoint), str(free_port())]
    done = subprocess.run(
        script,
        capture_output=True,
        text=True,
        timeout=200,
        env=fresh_environment(),
        start_new_session=True,
    )
    assert done.stdout.split("\n")[:2] == ["interrupted", "goes on"], done.stderr[-3000:]
