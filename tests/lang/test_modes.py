"""frozen, peek, score, select, adapt, clear_context."""

import math
from typing import Any

import pytest

from sgl_rwttt import (
    InvalidStateRequest,
    ReadOnlyState,
    UnsupportedByRule,
    assistant,
    function,
    gen,
    greedy_token_selection,
    select,
    unconditional_likelihood_normalized,
    user,
)
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.state import State

from .conftest import check_text
from .fake_transport import CHUNK, FakeServer

DOC = "A state is a function of the exact token sequence. The model keeps what it reads."


def modes(s: State) -> list[str]:
    return [mode for *_, mode in s.lineage.modes]


def test_frozen_region_reads(server: FakeServer, backend: StateBackend) -> None:
    """Text said before the region must not be read frozen, nor text of the region written."""

    @function
    def program(s: State) -> None:
        s += DOC
        with s.frozen():
            version, tail = s.version, s.tail
            s += "Q" + gen("a", max_tokens=3 * CHUNK)
            with s.frozen():
                s += "R"
            assert s.mode == "read"
            s += "S"
            assert (s.version, s.tail) == (version, tail)
        s += "T" + gen("b", max_tokens=3)
        assert s.mode == "write"
        assert modes(s) == ["write", "read", "write"]
        (_, end, _), (_, end2, _), _ = s.lineage.modes
        text = backend.text
        assert text.decode(s.tokens[:end]) == DOC
        assert text.decode(s.tokens[end:end2]) == "Q" + s["a"] + "RS"
        assert s.tail == (tail + len(s.tokens) - end2) % CHUNK
        check_text(s)

    program.run(backend=backend, temperature=0)


def test_frozen_refuses_writes(backend: StateBackend) -> None:
    """adapt and commit inside a frozen region would move the state it protects."""

    @function
    def program(s: State, what: Any) -> None:
        s += DOC
        with s.frozen():
            what(s)
            s.sync()

    for what in (lambda s: s.adapt("x"), lambda s: s.commit()):
        with pytest.raises(ReadOnlyState):
            program.run(what=what, backend=backend)
    with pytest.raises(InvalidStateRequest, match="not frozen"):
        function(lambda s: s.unfreeze()).run(backend=backend)


def test_peek_leaves_the_state(server: FakeServer, backend: StateBackend) -> None:
    """A scratch branch that leaves tokens, evidence or nodes behind is no scratch branch."""

    @function
    def program(s: State) -> None:
        s += DOC + gen("a", max_tokens=3)
        before = s.state_id, s.text(), s.tokens
        with s.peek() as p:
            p += "Is that right? " + select("ok", ["yes", "no"]) + gen("why", max_tokens=20)
            assert p["ok"] in ("yes", "no")
            assert p.version == s.version
            with p.fork(1) as inner:
                assert inner[0].mode == "read"
        s["ok"] = p["ok"]
        assert (s.state_id, s.text(), s.tokens) == before
        assert "why" not in s
        assert server.live_nodes == 2

    program.run(backend=backend, temperature=0)


def test_peek_cannot_be_unfrozen(backend: StateBackend) -> None:
    """A peek that writes would be a fork."""

    @function
    def program(s: State, what: Any) -> None:
        s += DOC
        with s.peek() as p:
            what(p)
            p.sync()

    for what in (lambda p: p.unfreeze(), lambda p: p.adapt(DOC)):
        with pytest.raises(ReadOnlyState):
            program.run(what=what, backend=backend)


def test_score_is_the_models_logprob(server: FakeServer, backend: StateBackend) -> None:
    """A logprob of the wrong token (off by one at the head) looks plausible and is wrong."""

    @function
    def program(s: State) -> None:
        s += "The model reads"
        s.flush()
        before = s.state_id
        nodes = server.live_nodes
        score = s.score(" and writes 🙂")
        node = server.sessions[s.owner].nodes[s.branch or ""]
        ids = list(score.tokens)
        assert backend.text.decode(ids) == " and writes 🙂"
        scratch = type(node)("x", None, node.root, node.tokens + ids, [*node.modes, *ids])
        scratch.modes[len(node.modes) :] = [type(node.modes[0]).READ] * len(ids)
        start = len(node.tokens)
        expected = [server.logprob(scratch, 0, start + i) for i in range(len(ids))]
        assert list(score.logprobs) == expected
        assert math.isclose(score.sum, sum(expected))
        assert math.isclose(score.perplexity, math.exp(-score.mean))
        s.flush()
        s += "!"
        s.flush()
        assert server.live_nodes == nodes + 1, "scratch nodes are freed with the next call"
        assert before != s.state_id

    program.run(backend=backend)


@pytest.mark.parametrize("adds_bos", [False, True])
def test_score_of_nothing_read(adds_bos: bool) -> None:
    """In an empty context only what follows a token is scored, and the state stays at the root."""
    from .fake_transport import FakeTransport

    made = StateBackend(FakeTransport(FakeServer(adds_bos=adds_bos)))

    @function
    def program(s: State) -> Any:
        before = s.state_id
        score = s.score("Yes, it reads")
        assert (s.state_id, s.position, s.tokens) == (before, 0, ())
        return score

    score = program.run(backend=made).ret_value
    ids = made.text.encode("Yes, it reads", at_root=False)
    assert list(score.tokens) == (ids if adds_bos else ids[1:])
    assert len(score.logprobs) == len(score.tokens)
    with pytest.raises(InvalidStateRequest, match="predict"):
        function(lambda s: s.score("")).run(backend=made)


@pytest.mark.parametrize(
    "method", [None, greedy_token_selection, unconditional_likelihood_normalized]
)
def test_select(method: Any, server: FakeServer, backend: StateBackend) -> None:
    """The winner's ids are kept as ids; scoring leaves no trace in the lineage."""
    choices = [" yes", " no", " perhaps it is the answer"]

    @function
    def program(s: State) -> None:
        s += DOC
        s += select("a", choices) if method is None else select("a", choices, choices_method=method)
        best = s["a"]
        assert s.pending == best
        means = s.get_meta_info("a")["normalized_prompt_logprobs"]
        if method is None:
            assert best == choices[means.index(max(means))]
            scores = [s.score(c).mean for c in choices] if not s.pending else []
            assert not scores
        s.flush()
        assert modes(s) == ["write"]
        assert backend.text.decode(s.tokens) == DOC + best
        assert server.live_nodes == 2

    program.run(backend=backend)


def test_select_agrees_with_score(backend: StateBackend) -> None:
    """The winner is the choice with the best mean logprob at that place."""

    @function
    def program(s: State) -> None:
        s += DOC
        with s.peek() as p:
            means = {c: p.score(c).mean for c in (" a", " keeps", " 42")}
        s += select("a", list(means))
        assert s["a"] == max(means, key=means.__getitem__)

    program.run(backend=backend)


def test_select_refuses(backend: StateBackend) -> None:
    """An empty choice has no logprob; a temperature would be ignored."""
    for bad in (select("a", ["x", ""]), select("a", ["x"], temperature=1.0)):
        with pytest.raises(InvalidStateRequest):
            function(lambda s, bad=bad: s.__iadd__("Q" + bad) and None).run(backend=backend)


def test_adapt_writes_and_clears(server: FakeServer, backend: StateBackend) -> None:
    """After adapt only the committed version stays: no context, no text, no messages."""

    @function
    def program(s: State) -> None:
        s += user("before") + assistant(gen("a", max_tokens=2))
        tokens = len(s.tokens) + len(backend.text.encode(s.pending, False))
        doc = len(backend.text.encode(DOC, False))
        s.adapt(DOC)
        assert s.version == (tokens + doc) // CHUNK
        assert (s.tail, s.position, s.text(), s.messages()) == (0, 0, "", [])
        first = s.version
        s.adapt(DOC, epochs=2)
        assert s.version == first + 2 * (doc // CHUNK)
        s.sync()
        assert len(server.sessions[s.owner].roots) <= 3
        with s.frozen():
            s += user("Q") + assistant(gen("b", max_tokens=4))
        assert s.version == first + 2 * (doc // CHUNK)
        assert len(server.sessions[s.owner].roots) == 2
        check_text(s)

    program.run(backend=backend, temperature=0)


def test_adapt_keeping_the_context(backend: StateBackend) -> None:
    """context="keep" is a plain write."""

    @function
    def program(s: State) -> None:
        s += "Q "
        s.adapt(DOC, context="keep")
        assert s.text() == "Q " + DOC
        assert s.pending == ""
        assert modes(s) == ["write"]

    program.run(backend=backend)


def test_adapt_warns_when_nothing_was_written(backend: StateBackend) -> None:
    """A text shorter than a chunk is dropped with the tail: silence would look like learning."""
    with pytest.warns(UserWarning, match="shorter than a chunk"):
        function(lambda s: s.adapt("Hi")).run(backend=backend)


def test_rollback_over_an_adapt(server: FakeServer, backend: StateBackend) -> None:
    """The context that adapt ended comes back, and the root it left is released."""

    @function
    def program(s: State) -> None:
        s += DOC
        here = s.checkpoint()
        s.adapt(DOC)
        adapted = s.checkpoint()
        s.rollback(here)
        assert s.text() == DOC
        s += " more" + gen("a", max_tokens=2)
        s.rollback(adapted)
        s += "Q" + gen("b", max_tokens=2)
        assert s.text() == "Q" + s["b"]

    program.run(backend=backend)


def test_clear_context(server: FakeServer, backend: StateBackend) -> None:
    """The version stays; what a rule cannot do is refused by the server, by type."""

    @function
    def program(s: State) -> None:
        s.clear_context()
        s += DOC
        version = len(backend.text.encode(DOC, False)) // CHUNK
        s.clear_context()
        assert (s.version, s.position, s.text()) == (version, 0, "")
        s += "Q"
        with pytest.raises(UnsupportedByRule):
            s.clear_context(tail="commit")
            s.sync()

    program.run(backend=backend)
    with pytest.raises(UnsupportedByRule, match="complete chunks of 8"):
        function(lambda s: s.commit()).run(backend=backend)


def test_clear_inside_a_role_is_refused(backend: StateBackend) -> None:
    """The role's beginning would be gone and its end would follow."""

    @function
    def program(s: State) -> None:
        with s.user():
            s += "Q"
            s.clear_context()

    with pytest.raises(InvalidStateRequest, match="close the role"):
        program.run(backend=backend)
