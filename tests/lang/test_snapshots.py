"""snapshot, restore and run(state=...)."""

from typing import Any

import pytest

from sgl_rwttt import (
    IncompatibleSnapshot,
    InvalidStateRequest,
    ReadOnlyState,
    RollbackBeyondRetention,
    UnknownState,
    assistant,
    assistant_begin,
    assistant_end,
    function,
    gen,
    select,
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
    refused(IncompatibleSnapshot, lambda s: s.restore("tutor", kv=True))
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


@function
def talk(s: State, name: str, closed: bool) -> Any:
    """Say something of every kind, save in the middle of it, go on."""
    s += user(DOC) + assistant(gen("first", max_tokens=5, temperature=0))
    with s.frozen():
        s += "Is it? " + select("ok", ["yes", "no"])
    here = s.checkpoint("here")
    s += "this is taken back"
    s.rollback(here)
    s += user("And")
    s += assistant_begin() + "So"
    if closed:
        s += assistant_end()
    s.snapshot(name, kv=True)
    return rest(s, closed)


def rest(s: State, closed: bool) -> Any:
    point = (s.tokens, s.text(), list(s.messages()), s.state_id, s.version, s.tail)
    if not closed:
        s += gen("more", max_tokens=2 * CHUNK, temperature=0) + assistant_end()
    s += user("On") + assistant(gen("end", max_tokens=CHUNK, temperature=0))
    check_text(s)
    return point, s["end"], list(s.messages()), s.text(), s.state_id, s.version


@pytest.mark.parametrize("closed", [True, False], ids=["between", "inside a role"])
def test_a_program_goes_on_in_mid_context(
    server: FakeServer, backend: StateBackend, closed: bool
) -> None:
    """Guards: a resumed program whose text, messages, role, modes or ids are not the original's;
    a prefill of the context; a pin or node that stays on the server."""
    original = talk.run("x", closed, backend=backend).ret_value
    server.boot()

    @function
    def resumed(s: State) -> Any:
        s += "said before and gone"
        answer = s.restore("x")
        assert (answer["position"], s.position) == (len(s.tokens), len(s.tokens))
        assert "tokens" not in answer
        session = server.sessions[s.owner]
        assert len(session.pins) == 1
        asked = server.asked
        found = rest(s, closed)
        prompts = [args["input_ids"] for op, args in server.log if op == "generate"]
        assert sum(map(len, prompts[asked:])) < len(found[0][0])
        s.flush()
        assert not session.pins
        return found

    assert function(resumed.func).run(backend=backend).ret_value == original

    @function
    def started(s: State) -> Any:
        return rest(s, closed)

    assert started.run(backend=backend, state="x").ret_value == original


def test_a_restored_place_forks_and_is_rolled_back_to(
    server: FakeServer, backend: StateBackend
) -> None:
    """Guards: a restored point that is lost, on either side, once the program has left it."""
    talk.run("x", True, backend=backend)

    @function
    def program(s: State) -> None:
        s.restore("x")
        here, text = s.checkpoint("restored"), s.text()
        s += "A" + gen("a", max_tokens=CHUNK, temperature=0)
        first = (s["a"], s.state_id)
        s.flush()
        assert len(server.sessions[s.owner].pins) == 1
        s.rollback(here)
        assert s.text() == text
        s += "A" + gen("a", max_tokens=CHUNK, temperature=0)
        assert (s["a"], s.state_id) == first
        with s.fork(2, at="restored") as branches:
            branches += "A" + gen("b", max_tokens=CHUNK, temperature=0)
            assert [(b["b"], b.state_id) for b in branches] == [first, first]
        start, restored = s.history()[:2]
        assert (start.what, restored.what, restored.checkpoints) == (
            "start",
            "restore x",
            ("restored",),
        )

    program.run(backend=backend)


def test_weights_of_a_file_with_a_context(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a program that asked for an empty context and got somebody's text."""
    talk.run("x", True, backend=backend)

    @function
    def program(s: State) -> None:
        restored = s.restore("x", kv=False)
        assert (s.text(), s.position, s.messages()) == ("", 0, [])
        assert s.version == restored["version"] > 0

    program.run(backend=backend)


def test_what_the_server_has_lost_is_computed_again(
    server: FakeServer, backend: StateBackend
) -> None:
    """Guards: a file that lacks a part, or a save that fails for memory that a request restores."""

    @function
    def program(s: State, times: int) -> int:
        s += DOC
        s.flush()
        server.lost += [RollbackBeyondRetention("of 9 tokens the KV is retained up to 4")] * times
        asked = server.asked
        s.snapshot(f"x{times}", kv=True)
        return server.asked - asked

    assert program.run(0, backend=backend).ret_value == 0
    assert program.run(1, backend=backend).ret_value == 1
    with pytest.raises(RollbackBeyondRetention, match="up to 4"):
        program.run(2, backend=backend)
    assert "x2" not in server.files


def test_text_that_the_tokens_do_not_say(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a resumed text that is another one, for a tokenizer that does not keep all of it."""

    @function
    def program(s: State, name: str) -> tuple[str, Any]:
        s += user("A") + assistant("B")
        s.flush()
        s.stream_executor.text_ = "What the tokenizer took apart"
        s.stream_executor.messages_ = [{"role": "user", "content": "not in it"}]
        s.snapshot("x", kv=True)
        return s.text(), s.messages()

    said = program.run("x", backend=backend).ret_value

    @function
    def resumed(s: State) -> tuple[str, Any]:
        return s.text(), s.messages()

    assert resumed.run(backend=backend, state="x").ret_value == said


@pytest.mark.parametrize(
    "client",
    [{"text": 5}, {"messages": {}}, {"messages": [["user", 0]]}, {"messages": [{}]}, {"role": 1}],
)
def test_what_no_program_has_saved(
    server: FakeServer, backend: StateBackend, client: dict[str, Any]
) -> None:
    """Guards: a crash, or a text of another kind, after a file that another client saved."""
    talk.run("x", True, backend=backend)
    server.contexts["x"].client = client

    @function
    def program(s: State) -> None:
        s.restore("x")

    with pytest.raises(IncompatibleSnapshot, match=r"^client: "):
        program.run(backend=backend)
    server.contexts["x"].client = {}

    @function
    def plain(s: State) -> None:
        s.restore("x")
        assert s.text() == s.stream_executor.backend.text.decode(s.tokens)
        assert s.messages() == []

    plain.run(backend=backend)


def test_an_empty_context_is_saved_as_its_weights(
    server: FakeServer, backend: StateBackend
) -> None:
    """Guards: a request that the server refuses, for a context that holds nothing."""

    @function
    def program(s: State) -> None:
        s.adapt(DOC)
        saved = s.snapshot("x", kv=True)
        assert saved["version"] == s.version > 0
        assert not server.contexts

    program.run(backend=backend)
