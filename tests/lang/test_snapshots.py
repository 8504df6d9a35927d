"""snapshot, restore and run(state=...)."""

from typing import Any

import pytest

from sgl_rwttt import (
    InvalidStateRequest,
    ReadOnlyState,
    UnknownState,
    UnsupportedByRule,
    function,
    gen,
    user,
)
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.state import State

from .conftest import check_text
from .fake_transport import CHUNK, FakeServer

DOC = "A state is a function of the exact token sequence. The model keeps what it reads."


@function
def study(s: State, name: str) -> Any:
    s += DOC
    saved = s.snapshot(name)
    assert s.text() == DOC
    assert saved["version"] == s.version > 0
    assert saved["tail_dropped"] == s.tail
    s.clear_context()
    s += "Q" + gen("a", max_tokens=2 * CHUNK, temperature=0)
    return s["a"], s.version, s.state_id


@function
def ask(s: State) -> Any:
    s += "Q" + gen("a", max_tokens=2 * CHUNK, temperature=0)
    check_text(s)
    return s["a"], s.version, s.state_id


def test_a_program_starts_from_a_file(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a restored run whose text, version or ids differ from the original's own clear."""
    original = study.run("tutor", backend=backend).ret_value
    server.boot()
    for options in ({}, {"stream": True}):
        s = ask.run(backend=backend, state="tutor", **options)
        assert s["a"] == original[0]
    assert ask.run(backend=backend, state="tutor").ret_value == original
    assert ask.run(backend=backend).ret_value != original
    batch = ask.run_batch([{}, {}], backend=backend, state="tutor")
    assert [run.ret_value for run in batch] == [original, original]


def test_restore_replaces_the_context(server: FakeServer, backend: StateBackend) -> None:
    """Guards: text of the old context in the new one; a root that is never released."""
    study.run("tutor", backend=backend)

    @function
    def program(s: State) -> None:
        s += DOC + gen("before", max_tokens=4, temperature=0)
        here = s.checkpoint()
        version, text = s.version, s.text()
        s += "not said"
        restored = s.restore("tutor")
        assert (s.text(), s.pending, s.position, s.tail) == ("", "", 0, 0)
        assert s.version == restored["version"]
        assert s["before"]
        saved = s.snapshot("again")
        assert (saved["root"], saved["tail_dropped"]) == (restored["root"], 0)
        s += "Q" + gen("a", max_tokens=3, temperature=0)
        check_text(s)
        s.rollback(here)
        assert (s.text(), s.version) == (text, version)
        s += "R"
        s.flush()
        session = server.sessions[s.owner]
        assert restored["root"] not in session.roots

    program.run(backend=backend)


def test_what_cannot_be_saved_or_restored(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a context that is silently not in the file; a frozen state that moves."""

    def refused(kind: type[Exception], program: Any) -> None:
        with pytest.raises(kind):
            function(program).run(backend=backend)

    study.run("tutor", backend=backend)
    refused(UnsupportedByRule, lambda s: s.snapshot("x", kv=True))
    refused(InvalidStateRequest, lambda s: s.snapshot("tutor"))
    refused(UnknownState, lambda s: s.restore("nothing"))
    with pytest.raises(UnknownState):
        ask.run(backend=backend, state="nothing")

    def frozen(s: State) -> None:
        s += DOC
        with s.frozen():
            s.snapshot("frozen")
            s.restore("tutor")

    refused(ReadOnlyState, frozen)
    assert server.files["frozen"] == server.files["tutor"]

    def in_a_role(s: State) -> None:
        with s.user():
            s += "Q"
            s.restore("tutor")

    refused(InvalidStateRequest, in_a_role)

    def goes_on(s: State) -> None:
        s += user(DOC)
        with pytest.raises(UnsupportedByRule):
            s.snapshot("x", kv=True)
        s.snapshot("tutor", replace=True)

    function(goes_on).run(backend=backend)
