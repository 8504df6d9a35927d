"""Every example, run as a user runs it, on one engine; each does what its page says it does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl_rwttt as rw
from examples import (
    ab_test,
    adapt_and_fork,
    batch_jsonl,
    best_of_n,
    chat,
    closed_book,
    resume,
    self_check,
    service,
    tree_search,
)
from sgl_rwttt.lang.checkpoint import Mark
from sgl_rwttt.lang.executor import StateExecutor
from tests.engine.preloaded import forking
from tests.engine.server import free_port
from tests.lang.fake_transport import FakeServer, FakeTransport

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rw.Engine]:
    with forking():
        backend = rw.Engine(
            max_total_tokens=8192,
            ttt_memory_mb=512,
            ttt_snapshot_dir=str(tmp_path_factory.mktemp("snapshots")),
            port=free_port(),
        )
    rw.set_default_backend(backend)
    yield backend
    rw.set_default_backend(None)
    with forking():
        backend.shutdown()


class Books:
    """Compares text and token ledger of every branch: at each mark, and when it ends."""

    def __init__(self) -> None:
        self.branches: set[StateExecutor] = set()
        self.wrong: list[tuple[str, str]] = []

    def check(self, executor: StateExecutor) -> None:
        cursor = executor._cursor
        if cursor is None or executor.error_ is not None:
            return
        text = executor.backend.text
        ids = [*cursor.ledger.tokens, *cursor.pending_ids]
        decoded = text.decode(ids) + cursor.pending_text
        self.branches.add(executor)
        if decoded != executor.text_:
            self.wrong.append((decoded, executor.text_))


@pytest.fixture(autouse=True)
def books(engine: rw.Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Books]:
    """Guards, in every example: text that is not its tokens, owners, roots or pins left over."""
    found = Books()
    let_go, mark_of = StateExecutor._let_go, Mark.of.__func__  # type: ignore[attr-defined]

    def checked_let_go(executor: StateExecutor) -> None:
        found.check(executor)
        let_go(executor)

    def checked_mark(cls: type[Mark], executor: StateExecutor) -> Mark:
        found.check(executor)
        mark: Mark = mark_of(cls, executor)
        return mark

    monkeypatch.setattr(StateExecutor, "_let_go", checked_let_go)
    monkeypatch.setattr(Mark, "of", classmethod(checked_mark))
    yield found
    assert found.branches, "no branch was looked at"
    assert not found.wrong
    info = engine.get_server_info()
    assert info["integrity_checked"]
    assert {k: info["store"][k] for k in ("owners", "roots", "pins")} == dict.fromkeys(
        ("owners", "roots", "pins"), 0
    )


def nodes(engine: rw.Engine, s: rw.State) -> int:
    """Requests of the run that the server still holds."""
    found: int = engine.transport.control("owner", {"owner": s.owner})["nodes"]
    return found


def test_adapt_and_fork() -> None:
    """Guards: text that is not its tokens in the demo; its numbers are tested in test_embedded."""
    texts = {"document": "glossary", "other": "code", "unrelated": "prose"}
    short = {key: adapt_and_fork.text(name)[:300] for key, name in texts.items()}
    before, after, _fork, parent, back = adapt_and_fork.adapt_and_fork.run(**short).ret_value
    assert after.document.mean > before.document.mean
    assert (parent.document, back.document) == (after.document, before.document)


def test_chat() -> None:
    """Guards: a conversation that leaves nothing in the weights, or never crosses a boundary."""
    report = chat.main([])
    assert len(report.answers) == len(chat.TURNS) and all(report.answers)
    assert report.versions == sorted(set(report.versions)) and report.versions[0] > 0
    assert report.after < 0.95 * report.before


def test_best_of_n(engine: rw.Engine) -> None:
    """Guards: a branch kept that is not the best, or losers that stay on the server."""
    candidates, state = best_of_n.main(["--n", "3"])
    assert len(candidates) == 3
    assert state["answer"] == max(candidates, key=lambda c: c.logprob).answer
    assert state["answer"] in state.text()

    held: list[int] = []

    @rw.function
    def counted(s: rw.State) -> None:
        s += "One, two," + gen_short("first")
        s.flush()
        held.append(nodes(engine, s))
        with s.fork(3) as branches:
            branches += [hint + gen_short("answer") for hint in (" and", " but", " or")]
            best = branches.best(best_of_n.mean_logprob)
            held.append(nodes(engine, s))
            s.keep(best)
        held.append(nodes(engine, s))

    counted.run()
    before, forked, kept = held
    assert forked - before >= 3
    assert kept - before == (forked - before) - 2, "two of three branches are freed"


def gen_short(name: str) -> Any:
    return rw.gen(name, max_tokens=3, temperature=0)


def test_self_check() -> None:
    """Guards: a failed attempt that stays in text or state, a check that passes everything."""
    *failed, last = self_check.main([])
    assert failed and last.passed
    assert json.loads(last.answer)["capital"] == "Paris"
    for attempt in failed:
        assert not attempt.passed
        assert attempt.after == attempt.before != attempt.wrote
    assert last.before == failed[0].before
    assert last.after == last.wrote != last.before
    fake = rw.StateBackend(FakeTransport(FakeServer()))
    with pytest.raises(rw.ProgramFailed, match="3 attempts"):
        self_check.checked.run(task="Hi", test=lambda answer: False, backend=fake)


def test_tree_search(books: Books) -> None:
    """Guards: a search that overspends, loses the best node, or lands in another place."""
    found = tree_search.main([])
    for start, best, text in found.values():
        path: list[tree_search.Node] = []
        node = best
        while node is not None:
            path.append(node)
            node = node.parent
        root = path[-1]
        everyone = list(walk(root))
        assert len(everyone) == 1 + 3 * len(tree_search.OPENINGS)
        assert best.value == max(node.value for node in everyone) > start
        assert len(path) == 1 + text.count(".")
        assert text == best.place.mark.text.removeprefix(tree_search.STORY)
    assert len(books.branches) == 2 * (1 + 3 * len(tree_search.OPENINGS))


def walk(node: tree_search.Node) -> Iterator[tree_search.Node]:
    yield node
    for child in node.children:
        yield from walk(child)


def test_closed_book() -> None:
    """Guards: adaptation without effect, or a document left in the context."""
    before, after = closed_book.main([])
    assert after.position == 0 and after.version > before.version == 0
    for old, new in zip(before.losses, after.losses, strict=True):
        assert new < 0.96 * old
    assert after.answer


def test_ab_test() -> None:
    """Guards: a branch that sees its sibling's document."""
    start, a, b, kept = ab_test.main([])
    assert a.a < 0.96 * start.a and abs(a.b / start.b - 1) < 0.02
    assert b.b < 0.96 * start.b and abs(b.a / start.a - 1) < 0.02
    assert (kept.version, kept.a, kept.b) == (a.version, a.a, a.b)


def test_resume(engine: rw.Engine) -> None:
    """Guards: a file that holds another state, or another conversation, than the saved one."""
    new, learnt, next_turn = resume.main(["today"], backend=engine)
    assert new.version == 0 < learnt.version
    assert resume.main(["tomorrow"], backend=engine) == [learnt, next_turn]
    assert next_turn.position > learnt.position == 0


def test_batch_jsonl(tmp_path: Path) -> None:
    """Guards: answers out of order, a bad line that takes others with it."""
    target = tmp_path / "out.jsonl"
    answers = batch_jsonl.main([str(batch_jsonl.QUESTIONS), str(target)])
    rows = [json.loads(line) for line in batch_jsonl.QUESTIONS.read_text("utf-8").splitlines()]
    assert [json.loads(line) for line in target.read_text("utf-8").splitlines()] == answers
    assert [answer["id"] for answer in answers] == [row["id"] for row in rows]
    for row, answer in zip(rows, answers, strict=True):
        assert ("error" in answer) is ("question" not in row)
    by_id = {answer["id"]: answer for answer in answers}
    assert "Paris" in by_id["paris"]["answer"]
    alone = batch_jsonl.ask.run(question=rows[-1]["question"])
    assert by_id[rows[-1]["id"]]["answer"] == alone.ret_value


def test_service(books: Books) -> None:
    """Guards: concurrent programs that get each other's state."""
    answers = service.main([])
    assert len(answers) == 50
    assert len({answer["state_id"] for answer in answers}) == 50
    assert len(books.branches) == 51
    for client in (0, 17, 49):
        alone = service.ask.run(question=service.question(client))
        assert answers[client] == {"answer": alone.ret_value, "state_id": alone.state_id}
