"""Text, messages and variables are those of sglang.lang's own interpreter on the same answers."""

from __future__ import annotations

from typing import Any

import pytest
import sglang as sgl
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import get_chat_template
from sglang.lang.choices import ChoicesDecision

import sgl_rwttt as rw
from sgl_rwttt.lang import StateBackend

from .fake_transport import FakeServer, FakeTransport

ANSWERS = ["Yes.", "42, the answer", "日本 🙂", " the model reads"]


class Canned(BaseBackend):
    """A backend for the stock interpreter that gives the answers in order."""

    def __init__(self, template: str) -> None:
        super().__init__()
        self.chat_template = get_chat_template(template)
        self.answers = list(ANSWERS)

    def generate(self, s: Any, sampling_params: Any) -> Any:
        return self.answers.pop(0), {}

    def select(self, s: Any, choices: Any, temperature: Any, choices_method: Any) -> Any:
        return ChoicesDecision(choices[0], {})


def chat(s: Any) -> None:
    s += sgl.system("Be brief 🙂.")
    s += sgl.user("A?") + sgl.assistant(sgl.gen("a", max_tokens=30))
    s += sgl.user("B?")
    s += sgl.assistant("So: " + sgl.gen("b", max_tokens=30) + "!")


def no_system(s: Any) -> None:
    s += sgl.user("A?" + " or B?")
    s += sgl.assistant(sgl.gen("a", max_tokens=30) + sgl.gen("b", max_tokens=30))
    s += sgl.user("C?") + sgl.assistant(sgl.gen("c", max_tokens=30))


def blocks(s: Any) -> None:
    with s.user():
        s += "  A?"
    with s.assistant(), s.var_scope("all"):
        s += "Hm. " + sgl.gen("a", max_tokens=30)
    s += sgl.user_begin() + "B?" + sgl.user_end()
    s += sgl.assistant_begin()
    s += sgl.gen("b", max_tokens=30)
    s += sgl.assistant_end()


def scoped(s: Any) -> None:
    with s.var_scope("outer"):
        s += "A " + sgl.gen("a", max_tokens=30)
        with s.var_scope("inner"):
            s += sgl.gen("b", max_tokens=30)
    s["known"] = s["outer"] + s["inner"]


def forked(s: Any) -> None:
    s += sgl.system("S") + sgl.user("A?")
    branches = s.fork(2)
    branches[0].assistant(sgl.gen("a", max_tokens=30))
    s["first"] = branches[0]["a"]
    branches[1].assistant("No, " + sgl.gen("a", max_tokens=30))
    s["second"] = branches[1]["a"]
    s["text"] = branches[1].text()
    branches.join()
    s.assistant(s["first"])
    s.user("And " + sgl.select("one", [" this?"]))


def plain(s: Any) -> None:
    s += "Q: " + sgl.gen("a", max_tokens=30) + "\n" + "R: "
    s += sgl.select("b", ["x"])
    s += sgl.gen("c", max_tokens=30, stop="the")


@pytest.mark.parametrize(
    "template", ["chatml", "default", "llama-2-chat", "llama-3-instruct", "qwen"]
)
@pytest.mark.parametrize(
    "program", [chat, no_system, blocks, scoped, forked, plain], ids=lambda p: p.__name__
)
def test_as_the_stock_interpreter(program: Any, template: str) -> None:
    """Guards: roles, default system messages or variables unlike those of sglang.lang."""
    stock = Canned(template)
    if program is plain:
        stock.answers[1] = "42, "
    theirs = sgl.function(program).run(backend=stock)
    server = FakeServer()
    server.say(*ANSWERS)
    backend = StateBackend(FakeTransport(server), chat_template_name=template)
    ours = rw.function(program).run(backend=backend, temperature=0)
    assert ours.text() == theirs.text()
    assert ours.messages() == theirs.messages()
    names = set(theirs.stream_executor.variables)
    assert {n: ours[n] for n in names} == {n: theirs[n] for n in names}


def test_stops_of_the_program_stay_its_own(backend: StateBackend, server: FakeServer) -> None:
    """Guards: the template's stops appended, at each use, to the list that the program passed."""
    stops = ["STOP"]

    @rw.function
    def program(s: Any) -> None:
        for i in range(3):
            s += "Q" + rw.gen(f"a{i}", max_tokens=2, stop=stops)

    program.run(backend=backend)
    assert stops == ["STOP"]
    sent = [p["sampling_params"]["stop"] for op, p in server.log if op == "generate"]
    assert sent == [["STOP", "<|im_end|>"]] * 3


def test_an_open_scope_has_no_value(backend: StateBackend) -> None:
    """Guards: a reader inside the scope that waits for its end, which can then never come."""

    @rw.function
    def program(s: Any) -> None:
        with s.var_scope("x"):
            s += "text"
            with pytest.raises(KeyError):
                s["x"]
        assert s["x"] == "text"

    program.run(backend=backend)


def begin_twice(s: Any) -> None:
    with s.user():
        s += rw.assistant("x")


def end_without_begin(s: Any) -> None:
    s += "x"
    here = s.checkpoint()
    with s.user():
        s += "y"
        s.rollback(here)


def half_a_pair(s: Any) -> None:
    s += "x\ud83d" + rw.gen("a")


def best_of_selects(s: Any) -> None:
    s += "x"
    with s.fork(2) as branches:
        branches += rw.select("a", [" yes", " no"])
        branches.best("a")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (begin_twice, "close 'user'"),
        (end_without_begin, "no role is open"),
        (half_a_pair, "UTF-8"),
        (best_of_selects, "not generated"),
    ],
    ids=lambda p: getattr(p, "__name__", None),
)
def test_what_cannot_be_said(program: Any, says: str, backend: StateBackend) -> None:
    """Guards: sglang.lang's bare assertions and a message with the whole text in it."""

    def synced(s: Any) -> None:
        program(s)
        s.sync()

    with pytest.raises(rw.InvalidStateRequest, match=says):
        rw.function(synced).run(backend=backend)
