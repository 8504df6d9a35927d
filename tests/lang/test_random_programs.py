"""Random programs over all verbs, against an oracle that shares no code with the package."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sgl_rwttt import Runtime, function
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.state import State

from .fake_http import FakeHttp
from .fake_transport import FakeTransport
from .oracle import Branch, World
from .toy_tokenizer import toy_tokenizer
from .walk import MenuServer, Op, Walk, programs, view_of_branch, view_of_server, view_of_state

pytestmark = pytest.mark.timeout(120)
SETTINGS = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def expected(server: MenuServer, program: list[Op], every: bool) -> list[Any]:
    """What the oracle sees."""
    world = World(server.answers())

    def view(s: Branch) -> Any:
        return view_of_branch(s), world.alive()

    walk = Walk(view, every, None)
    walk(world.start(), program)
    return walk.seen


def check(
    server: MenuServer, backend: StateBackend, program: list[Op], every: bool, **options: Any
) -> None:
    """Run it and compare with the oracle at every look; nothing may be left at the end."""
    want = expected(server, program, every)

    @function
    def run(s: State) -> None:
        walk = Walk(lambda s: (view_of_state(s), view_of_server(server, s)), every, want)
        walk(s, program)
        assert len(walk.seen) == len(want)

    server.files.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # adapt of a short text
        s = run.run(backend=backend, temperature=0, **options)
        list(s.text_iter())
    s.sync()
    assert not server.sessions


ways = st.sampled_from([{}, {"use_thread": False}, {"stream": True}])


@settings(SETTINGS, max_examples=200)
@given(programs(), st.booleans(), ways)
def test_programs_equal_the_oracle(program: list[Op], every: bool, way: dict[str, bool]) -> None:
    """Guards: any difference between what a program has and what its operations mean, and a node,
    pin or root that the server keeps too long or not long enough."""
    server = MenuServer()
    check(server, StateBackend(FakeTransport(server)), program, every, **way)


@pytest.fixture(scope="module")
def over_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[MenuServer, Runtime]]:
    path = tmp_path_factory.mktemp("tokenizer")
    toy_tokenizer().save_pretrained(path)
    server = MenuServer()
    with FakeHttp(server) as http:
        runtime = Runtime(http.url, tokenizer_path=str(path))
        yield server, runtime
        runtime.shutdown()


@settings(SETTINGS, max_examples=20)
@given(program=programs(), every=st.booleans(), way=st.sampled_from([{}, {"stream": True}]))
def test_programs_over_http(
    program: list[Op],
    every: bool,
    way: dict[str, bool],
    over_http: tuple[MenuServer, Runtime],
) -> None:
    """Guards: a way to the server that changes what a program means."""
    server, runtime = over_http
    check(server, runtime, program, every, **way)


def test_the_oracle_shares_nothing() -> None:
    """Guards: an oracle that agrees because it runs the code that it judges."""
    source = (Path(__file__).parent / "oracle.py").read_text()
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert not [line for line in imports if "sgl" in line or "from ." in line]
