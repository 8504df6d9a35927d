"""fork, keep, best, prune, join, checkpoint, rollback."""

import gc
from typing import Any

import pytest

from sgl_rwttt import (
    ForeignOwner,
    InvalidStateRequest,
    OwnerReleased,
    RollbackBeyondRetention,
    assistant,
    function,
    gen,
    user,
)
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.state import State

from .conftest import check_text
from .fake_transport import CHUNK, FakeServer


def commits(server: FakeServer) -> int:
    generates = [p for op, p in server.log if op == "generate"]
    return sum(p["sampling_params"]["max_new_tokens"] == 0 for p in generates)


def test_fork_always_consumes_what_was_just_said(server: FakeServer, backend: StateBackend) -> None:
    """Stock fork tests the text before it syncs: right after a fill it committed nothing."""

    @function
    def program(s: State) -> None:
        for _ in range(1000):
            s += "x"
            with s.fork(1) as branches:
                assert branches[0].position == s.position
                assert branches[0].pending == ""

    s = program.run(backend=backend, use_thread=True)
    assert commits(server) == 1000
    assert s.position == 1000


def test_children_share_one_commit_node(server: FakeServer, backend: StateBackend) -> None:
    """Each child consuming the parent's text again would cost n prefills."""

    @function
    def program(s: State) -> None:
        s += "A state is " + gen("a", max_tokens=3)
        with s.fork(4) as branches:
            ids = {b.state_id for b in branches}
            assert ids == {s.state_id}
            branches += [f" {i}" + gen("b", max_tokens=2) for i in range(4)]
            branches += lambda i: f" no {i}"
            texts = [b.text() for b in branches]
        assert len(set(texts)) == 4
        assert all(text.startswith(s.text()) for text in texts)

    program.run(backend=backend, temperature=0)
    parents = [
        p["session_params"].get("rid")
        for op, p in server.log
        if op == "generate" and p["sampling_params"]["max_new_tokens"] == 2
    ]
    assert len(parents) == 4 and len(set(parents)) == 1
    assert commits(server) == 1


def test_fork_without_pending_asks_nothing(server: FakeServer, backend: StateBackend) -> None:
    """A settled place needs no commit node."""

    @function
    def program(s: State) -> None:
        s += "A"
        s.flush()
        before = len(server.log)
        with s.fork(3):
            pass
        assert len(server.log) == before

    program.run(backend=backend)


def test_fork_of_nothing(server: FakeServer, backend: StateBackend) -> None:
    """Branches of an empty context are root requests of their own."""

    @function
    def program(s: State) -> None:
        with s.fork(2) as branches:
            branches += ["Yes" + gen("a", max_tokens=2), "No" + gen("a", max_tokens=2)]
            s.keep(branches[1])
        assert s.text().startswith("No")
        s.rollback(s.checkpoint())

    program.run(backend=backend)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_keep_frees_exactly_the_others(n: int, server: FakeServer, backend: StateBackend) -> None:
    """A loser that is not freed keeps its KV and its pages; a freed winner loses the answer."""

    @function
    def program(s: State) -> None:
        s += user("Q")
        s.flush()
        with s.fork(n) as branches:
            branches += "A" + gen("a", max_tokens=3)
            branches += "B" + gen("b", max_tokens=3)
            for branch in branches:
                branch.sync()
            assert server.live_nodes == 1 + 2 * n
            best = branches.best("a")
            expected = best.text(), best.tokens, best.state_id
            s.keep(best)
        assert server.live_nodes == 1 + 2
        assert (s.text(), s.tokens, s.state_id) == expected
        s += "C" + gen("c", max_tokens=2)
        check_text(s)

    program.run(backend=backend)


def test_leaving_without_keep_frees_all(server: FakeServer, backend: StateBackend) -> None:
    """The commit node's pin goes too."""

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(3) as branches:
            branches += gen("a", max_tokens=2)
        session = server.sessions[s.owner]
        assert server.live_nodes == 1
        assert not session.pins
        with pytest.raises(OwnerReleased):
            branches[0] += "more"
        assert isinstance(branches[0]["a"], str), "what a branch said stays readable"

    program.run(backend=backend)


def test_keep_takes_only_own_branches(backend: StateBackend) -> None:
    """A state taken over from another run would read weights that are not its own."""
    other = function(lambda s: s.flush() if s.sync() else None).run(backend=backend, keep=True)

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(1) as branches, branches[0].fork(1) as inner:
            with pytest.raises(ForeignOwner):
                s.keep(inner[0])
            with pytest.raises(ForeignOwner):
                s.keep(other)
            s.keep(branches[0])

    program.run(backend=backend)
    other.release()


def test_best_by_logprob_and_by_key(server: FakeServer, backend: StateBackend) -> None:
    """best(name) compares means over kept tokens, not sums that favour short answers."""

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(3) as branches:
            branches += gen("a", max_tokens=4, temperature=1.0)
            means = []
            for branch in branches:
                items = branch.get_meta_info("a")["output_token_logprobs"]
                means.append(sum(x[0] for x in items) / len(items))
            assert branches.best("a") is branches[means.index(max(means))]
            assert branches.best(lambda b: b["a"])["a"] == max(b["a"] for b in branches)
            with pytest.raises(InvalidStateRequest, match="not generated"):
                branches.best("nothing")

    program.run(backend=backend)


def test_prune_and_join(server: FakeServer, backend: StateBackend) -> None:
    """prune frees losers at once; join gathers variables and nothing else."""

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(4) as branches:
            branches += [f"{i}" + gen("a", max_tokens=2) for i in range(4)]
            branches.prune(lambda b: b.text()[1], keep=2)
            assert [b.text()[1] for b in branches] == ["2", "3"]
            assert server.live_nodes == 3
            branches.join()
        assert len(s["a"]) == 2
        assert s.text() == "Q"
        with pytest.raises(InvalidStateRequest):
            branches.join("concate_and_append")

    program.run(backend=backend)


@pytest.mark.parametrize("k", range(CHUNK + 2))
def test_rollback_by_k(k: int, server: FakeServer, backend: StateBackend) -> None:
    """Weights, tail, KV, text, messages, role and results go back together, over boundaries too."""

    def look(s: Any) -> Any:
        return s.text(), s.tokens, s.state_id, s.version, s.tail, list(s.messages()), "b" in s

    @function
    def program(s: State) -> None:
        s += user("Q") + assistant(gen("a", max_tokens=5))
        s += user("R")
        here = s.checkpoint("here")
        before = look(s)
        if k:
            s += "x" + gen("b", max_tokens=k) if k > 1 else "x"
            s.flush()
        s.rollback(here)
        assert look(s) == before
        s += assistant(gen("b", max_tokens=4))
        first = look(s)
        s.rollback("here")
        s += assistant(gen("b", max_tokens=4))
        assert look(s) == first
        check_text(s)

    program.run(backend=backend, temperature=0)


def test_rollback_drops_what_was_abandoned(server: FakeServer, backend: StateBackend) -> None:
    """Abandoned nodes would pile up with every failed attempt of a retry loop."""

    @function
    def program(s: State) -> None:
        s += "Q"
        s.checkpoint()
        for _ in range(5):
            s += gen("a", max_tokens=3) + "!" + gen("b", max_tokens=3)
            s.sync()
            assert server.live_nodes <= 3
            s.rollback()
        s.flush()

    program.run(backend=backend)


def test_rollback_keeps_what_others_need(server: FakeServer, backend: StateBackend) -> None:
    """A later checkpoint and a branch behind the rollback point must survive it."""

    @function
    def program(s: State) -> None:
        s += "Q"
        early = s.checkpoint()
        s += gen("a", max_tokens=4)
        late = s.checkpoint()
        alt = s.fork(1)
        s.rollback(early)
        s += "again" + gen("a", max_tokens=2)
        alt[0].__iadd__("alt" + gen("b", max_tokens=2))
        alt[0].sync()
        s.rollback(late)
        s += "late" + gen("a", max_tokens=2)
        s.sync()
        alt.release()
        gc.collect()

    program.run(backend=backend)


def test_fork_at_a_checkpoint_leaves_the_head(backend: StateBackend) -> None:
    """A branch from an earlier place is not a rollback."""

    @function
    def program(s: State) -> None:
        s += "One"
        here = s.checkpoint()
        s += " two" + gen("a", max_tokens=3)
        head = s.state_id
        alt = s.fork(1, at=here)[0]
        assert (alt.text(), alt.state_id, alt.position) == ("One", here.state_id, here.position)
        alt += " three" + gen("a", max_tokens=2)
        check_text(alt)
        assert s.state_id == head

    program.run(backend=backend)


def test_rollback_refuses(backend: StateBackend) -> None:
    """There is nothing to go back to, or it is somebody else's."""
    kept: list[Any] = []

    @function
    def first(s: State) -> None:
        s += "Q"
        kept.append(s.checkpoint())

    @function
    def second(s: State) -> None:
        s += "Q"
        with pytest.raises(RollbackBeyondRetention, match="no checkpoint"):
            s.rollback()
        with pytest.raises(RollbackBeyondRetention, match="'there'"):
            s.rollback("there")
        with pytest.raises(ForeignOwner):
            s.rollback(kept[0])
        with pytest.raises(ForeignOwner):
            s.fork(1, at=kept[0])
        s += "still usable"

    first.run(backend=backend)
    second.run(backend=backend)
    with pytest.raises(AttributeError):
        kept[0].name = "other"
