"""Program.trace: the whole program, without a server."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sgl_rwttt import (
    ReadOnlyState,
    Score,
    State,
    Trace,
    TraceLimit,
    assistant,
    function,
    gen,
    select,
    system,
    user,
)

pytestmark = pytest.mark.timeout(60)


@function
def everything(s: State, q: str, document: str = "d" * 200) -> str:
    s.adapt(document, epochs=2)
    s += system("Be brief.")
    s += user("Hi " + q)
    here = s.checkpoint("asked")
    with s.fork(3) as branches:
        branches += assistant(gen("a", max_tokens=20, temperature=0.9))
        s.keep(branches.best(lambda b: float(b["a"])))
    with s.fork(2, at=here) as branches:
        branches += [assistant("x" + gen("b", stop="\n")), assistant("y")]
        branches.join()
    with s.frozen():
        s += user("sure?")
        with s.assistant():
            s += select("ok", ["yes", "no"])
            with s.peek() as p:
                p += gen("t")
    s.score("abc")
    s.snapshot("tutor")
    s.restore("tutor")
    s += "Count: " + gen("n", dtype=int)
    assert int(s["n"]) == 0
    s.rollback(here)
    s.clear_context()
    return str(s["a"])


EVERYTHING = f"""\
everything(q='you')
  adapt {"d" * 60!r}... (200 characters), epochs=2
  system
    fill 'Be brief.'
  user
    fill 'Hi you'
  checkpoint 'asked'
  fork 3
    branches 0 to 2
      assistant
        gen 'a' max_new_tokens=20, temperature=0.9
  best by <lambda>
  keep branch 0
  fork 2 at 'asked'
    branch 0
      assistant
        fill 'x'
        gen 'b' stop='\\n'
    branch 1
      assistant
        fill 'y'
  join
  frozen
    user
      fill 'sure?'
    assistant
      select 'ok' choices=['yes', 'no']
      peek
        gen 't'
  score 'abc'
  snapshot 'tutor'
  restore 'tutor'
  fill 'Count: '
  gen 'n' dtype=int
  rollback to 'asked'
  clear_context
  raises KeyError: 'a'"""


def test_everything_is_in_the_trace() -> None:
    """The stock tracer has no fork with join, and knows none of our verbs."""
    trace = everything.trace("you")
    assert str(trace) == EVERYTHING
    assert isinstance(trace.error, KeyError)  # the rollback took the answer back


def test_the_program_sees_what_it_would_see() -> None:
    """A tracer with an interpreter of its own: text, variables and checks that no run has."""
    seen: list[Any] = []

    @function
    def program(s: State, q: str) -> str:
        s += user(q) + assistant(gen("a"))
        seen.append((s["a"], s.text(), s.messages()[-1], s.score("xy")))
        with s.frozen():
            s.adapt("z")
        return "never"

    trace = program.trace(q="Q", temperature=0)
    answer, text, message, score = seen[0]
    assert answer == "[a]"
    assert text == trace.text
    assert "<|im_start|>user\nQ<|im_end|>" in text
    assert message == {"role": "assistant", "content": "[a]"}
    assert score == Score((120, 121), (-1.0, -1.0))
    assert isinstance(trace.error, ReadOnlyState)
    assert trace.variables == {"a": "[a]"}


def test_snapshots_are_those_of_the_trace() -> None:
    """A traced program that resumes from its own file stands somewhere else than it would."""

    @function
    def program(s: State) -> tuple[str, ...]:
        s += "Q" + gen("a")
        s.snapshot("middle", kv=True)
        s.snapshot("weights")
        before = s.state_id
        s += "more"
        s.restore("middle")
        assert (s.state_id, s.text()) == (before, "Q[a]")
        s += "!"
        s.restore("weights")
        assert (s.position, s.version, s.text()) == (0, 4, "")
        s.restore("middle", kv=False)
        assert s.memory()["pages"] == 0
        s.restore("never saved")
        s += "new" + gen("b")
        return s.tokens[:3]

    trace = program.trace()
    assert (trace.error, trace.ret_value) == (None, tuple(b"new"))


def test_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace opens an engine, or leaves threads behind."""
    from sgl_rwttt.lang import engine

    monkeypatch.setattr(engine, "Engine", None)
    threads = threading.active_count()
    assert everything.trace("you").nodes
    assert threading.active_count() == threads


def test_answers_are_given_by_name() -> None:
    """A program whose path hangs on an answer can be traced on one path only."""

    @function
    def retry(s: State) -> str:
        for _ in range(5):
            s += "Q" + gen("a")
            s += select("ok", ["no", "yes"])
            if s["ok"] == "yes":
                return str(s["a"])
        raise AssertionError

    trace = retry.trace(answers={"a": ["one", "two", "three"], "ok": ["no", "yes"]})
    assert trace.ret_value == "two"
    assert trace.text == "QonenoQtwoyes"
    assert str(trace).count("gen 'a'") == 2


@pytest.mark.timeout(20)
def test_a_loop_without_end_is_ended() -> None:
    """A program that repeats until a check passes hangs, also when it catches every Exception."""

    @function
    def stubborn(s: State, q: str) -> None:
        while True:
            try:
                with s.fork(2) as branches:
                    branches += q + gen("a")
                    if branches[0]["a"] == "right":
                        return
            except Exception:
                pass

    with pytest.raises(TraceLimit, match="more than 50 nodes") as raised:
        stubborn.trace("Q", nodes=50)
    said = raised.value.trace
    assert str(said).count("fork 2") == 10
    assert stubborn.trace("Q", answers={"a": ["wrong", "wrong", "right", "x"]}).error is None
    assert isinstance(stubborn.bind(q="Q").trace(answers={"a": "right"}), Trace)


def test_arguments_are_checked_first() -> None:
    """A forgotten argument looks like a program that failed."""
    with pytest.raises(TypeError, match="missing a required argument: 'q'"):
        everything.trace()
    with pytest.raises(TypeError, match="unexpected"):
        everything.trace("you", qq=1)


def test_branches_that_differ_are_not_merged() -> None:
    """Branches are shown as one where only one of them has said something."""

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(4) as branches:
            branches += gen("a")
            branches[2] += "more"
            branches.prune("a", keep=2)
            assert len(branches) == 2

    lines = [line.strip() for line in str(program.trace()).splitlines()]
    assert [line for line in lines if line.startswith("branch")] == [
        "branches 0 to 1",
        "branch 2",
        "branch 3",
    ]
    assert lines[-1] == "prune 'a', keep=2"
