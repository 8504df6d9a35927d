"""history(), tree() and memory(): what a branch was through, and what its owner holds."""

from typing import Any

import pytest

from sgl_rwttt import UnknownOwner, assistant, function, gen, select, tree, user
from sgl_rwttt.lang import Event, StateBackend, tree_of
from sgl_rwttt.lang.state import State

from .fake_transport import CHUNK, FakeServer


def what(s: State) -> list[str]:
    return [event.what for event in s.history()]


def test_history_says_what_was_said(backend: StateBackend) -> None:
    """Guards: an event of another place, branch or mode than the one that the program was at."""

    @function
    def program(s: State) -> None:
        s += user("A question") + assistant(gen("a", max_tokens=5, temperature=0))
        s.checkpoint("asked")
        here = (s.branch, s.position, s.version, s.tail, s.state_id)
        with s.frozen():
            s += "Is it? " + select("ok", ["yes", "no"]) + gen("b", max_tokens=2, temperature=0)
        s.flush()
        events = s.history()
        assert what(s) == ["start", "gen a", "fill", "fill", "select ok, gen b", "fill"]
        start, _, asked, *_, read, last = events
        assert (start.branch, start.position, start.mode) == (None, 0, None)
        assert (asked.branch, asked.position, asked.version, asked.tail, asked.state_id) == here
        assert asked.checkpoints == ("asked",)
        assert (asked.mode, read.mode, last.mode) == ("write", "read", "write")
        assert (last.branch, last.position, last.state_id) == (s.branch, s.position, s.state_id)
        assert [e.position for e in events] == sorted(e.position for e in events)
        assert repr(asked) == (
            f"<@{asked.position} v{asked.version}+{asked.tail} {asked.state_id[:8]} write fill "
            "[asked]>"
        )

    program.run(backend=backend)


def test_history_begins_at_the_root_of_the_context(backend: StateBackend) -> None:
    """Guards: places of a context that was cleared, or a root without its version."""

    @function
    def program(s: State) -> None:
        s.adapt("A text that is long enough to write a version of the state, and more.", epochs=2)
        (root,) = s.history()
        assert (root.what, root.version, root.state_id) == ("adapt", s.version, s.state_id)
        s += "B"
        s.clear_context()
        assert what(s) == ["clear"]
        s += "C"
        assert what(s) == ["clear"]
        s.flush()
        assert what(s) == ["clear", "fill"]

    program.run(backend=backend)


def test_rolled_back_is_gone_and_forks_share(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a history of what the state does not hold; nodes that stay for the history's sake."""

    @function
    def program(s: State) -> None:
        s += "A"
        here = s.checkpoint("here")
        before = s.history()
        s += gen("a", max_tokens=3, temperature=0) + "B"
        s.flush()
        assert what(s) == ["start", "fill", "gen a", "fill"]
        gone = s.history()
        s.rollback(here)
        assert s.history() == before
        s += "C"
        s.flush()
        assert server.live_nodes == 2
        assert gone[-1].what == "fill"
        with s.fork(2) as branches:
            branches += [gen("x", max_tokens=2), gen("y", max_tokens=2)]
            ours = s.history()
            for branch, name in zip(branches, "xy", strict=True):
                assert branch.history()[:-1] == ours
                assert branch.history()[-1].what == f"gen {name}"
            s.keep(branches[1])
        assert what(s)[-1] == "gen y"

    program.run(backend=backend)


def test_the_tree_of_a_state_names_its_places(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a graph that lacks a branch, or that shows the id by which it could be used."""

    @function
    def program(s: State) -> None:
        s += "A"
        s.checkpoint("base")
        with s.fork(2) as branches:
            branches += gen("x", max_tokens=2)
            for branch in branches:
                branch.sync()
            drawn = tree(s)
            assert len(drawn.splitlines()) == 1 + 3 + 1 + 1
            assert "HEAD" in drawn
            assert "checkpoint base" in drawn
            assert drawn.count("gen x") == 2
            assert s.owner not in drawn
            assert drawn.count("\n* ") + drawn.count("\n| *") == 3
        assert tree(s.owner, backend=backend).count("*") == 1

    program.run(backend=backend)
    with pytest.raises(UnknownOwner):
        tree("nobody", backend=backend)


def branch(rid: str, parent: str | None, **more: Any) -> dict[str, Any]:
    return {
        "rid": rid,
        "parent": parent,
        "running": False,
        "mode": "write",
        "pin": None,
        "next_root": None,
        "root": "r" * 32,
        "position": 1,
        "version": 0,
        "tail": 1,
        "state_id": "f" * 32,
        **more,
    }


def drawn(*branches: dict[str, Any]) -> list[str]:
    """The graph alone: marks and the beginning of each rid."""
    held = {
        "name": "f6a3d549",
        "nodes": len(branches),
        "pin_count": 0,
        "root_count": 0,
        "referenced_bytes": 0,
        "branches": list(branches),
    }
    lines = tree_of(held).splitlines()[1:]
    return [line.split(" @")[0] for line in lines]


def test_a_line_of_requests() -> None:
    """Guards: a parent above its child."""
    assert drawn(branch("a", None), branch("b", "a")) == ["*  b", "*  a", "o  root rrrrrrrr"]


def test_branches_join_at_their_parent() -> None:
    """Guards: two branches drawn as one line, or a line that ends in the air."""
    assert drawn(
        branch("a", None),
        branch("b", "a"),
        branch("c", "a"),
        branch("d", "b"),
        branch("e", "a"),
    ) == [
        "*  e",
        "| *  d",
        "| | *  c",
        "| * |  b",
        "|_|/",
        "|/",
        "*  a",
        "o  root rrrrrrrr",
    ]


def test_a_cleared_context_hangs_on_the_request_that_cleared() -> None:
    """Guards: contexts drawn as strangers, and marks that are left out."""
    found = drawn(
        branch("a", None, next_root="c" * 32, pin="p"),
        branch("b", None, root="c" * 32, running=True),
        branch("x", "forgotten"),
    )
    assert found == ["*  x", "*  b", "o  root cccccccc", "*  a", "o  root rrrrrrrr"]
    held = {"name": "n", "nodes": 0, "pin_count": 0, "root_count": 0, "referenced_bytes": 7}
    refused = branch("z", None, root=None, position=None, mode=None)
    lines = tree_of({**held, "branches": [refused], "truncated": True}, {"z": ["HEAD"]})
    assert lines.splitlines() == [
        "owner n: 0 requests (0 running), 0 pins, 0 roots, 7 bytes",
        "*  z refused (HEAD)",
        "(older requests are left out)",
    ]


def test_memory_is_the_servers_word(server: FakeServer, backend: StateBackend) -> None:
    """Guards: numbers that are asked for before what was said has happened."""

    @function
    def program(s: State) -> None:
        s += "A" + gen("a", max_tokens=CHUNK)
        assert s.memory() == {"context_tokens": 1}

    program.run(backend=backend)


def test_an_event_is_small_and_frozen() -> None:
    """Guards: a history that keeps tokens, or that a program can rewrite."""
    event = Event("rid", 3, 1, 2, "ab" * 16, "write", "fill")
    with pytest.raises(AttributeError):
        event.position = 4  # type: ignore[misc]
    assert not hasattr(event, "__dict__")
