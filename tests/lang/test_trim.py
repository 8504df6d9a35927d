"""Stop strings, stop tokens and EOS leave the lineage together with the text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_rwttt import assistant, function, gen, user
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.state import State
from sgl_rwttt.lang.text import TokenText

from .conftest import check_text
from .fake_transport import FakeServer
from .toy_tokenizer import TEXT, toy_tokenizer

TOOL = TokenText(toy_tokenizer())


def run(backend: StateBackend, *parts: Any, **sampling: Any) -> State:
    @function
    def program(s: State) -> None:
        for part in parts:
            s += part

    s = program.run(backend=backend, temperature=0, **sampling)
    check_text(s)
    return s


def test_stop_inside_a_token(server: FakeServer, backend: StateBackend) -> None:
    """The characters before a stop that cuts a token must come back before the next fill."""
    ids = TOOL.encode("The model", at_root=False)
    assert len(ids) <= 3, "the toy tokenizer has ' model' as one token"
    server.say(ids)
    s = run(backend, "Say: ", gen("a", max_tokens=9, stop="del"), "n. ", gen("b", max_tokens=2))
    assert s["a"] == "The mo"
    assert "Say: The mon. " in s.text()
    sent = [p["input_ids"] for op, p in server.log if op == "generate"]
    assert TOOL.decode(sent[1]) == " mon. "


def test_stop_over_several_tokens(server: FakeServer, backend: StateBackend) -> None:
    """A stop string made of several tokens must take all of them out of the lineage."""
    server.say("yes STOP here")
    s = run(backend, "Q", gen("a", max_tokens=20, stop=["zzz", "STOP here"]))
    assert s["a"] == "yes "
    assert TOOL.decode(s.tokens) + s.pending == "Qyes "


@pytest.mark.parametrize("length", range(1, 19))
def test_stop_across_a_boundary(length: int, server: FakeServer, backend: StateBackend) -> None:
    """Trimmed tokens may have completed a chunk on the server; the head must be before it."""
    server.say(TOOL.encode("a" * length + "STOP", at_root=False))
    s = run(backend, "Q ", gen("a", max_tokens=60, stop="STOP"), " go on", gen("z", max_tokens=3))
    assert s["a"] == "a" * length


def test_eos_and_role_suffix_once(server: FakeServer, backend: StateBackend) -> None:
    """EOS stays in SGLang's session; with the role's suffix the model would see it twice."""
    end = server.tokenizer.eos_token_id
    server.say([*TOOL.encode("Yes.", False), end], [*TOOL.encode("No.", False), end])
    s = run(backend, user("A?"), assistant(gen("a")), user("B?"), assistant(gen("b")))
    assert (s["a"], s["b"]) == ("Yes.", "No.")
    assert s.tokens.count(end) + TOOL.encode(s.pending, False).count(end) == 4
    assert "<|im_end|><|im_end|>" not in s.text()


def test_stop_token_id(server: FakeServer, backend: StateBackend) -> None:
    """A stop token id is trimmed like EOS."""
    ids = TOOL.encode("Yes or no?", False)
    server.say(ids)
    s = run(backend, "Q", gen("a", max_tokens=9, stop_token_ids=[ids[-1]]))
    assert s["a"] == TOOL.decode(ids[:-1])
    assert s.tokens[-1] == ids[-2]


def test_immediate_stop_keeps_nothing(server: FakeServer, backend: StateBackend) -> None:
    """An answer that is trimmed to nothing leaves the head at the end of the prompt."""
    server.say([server.tokenizer.eos_token_id])
    s = run(backend, "Q", gen("a"), "R", gen("b", max_tokens=2))
    assert s["a"] == ""
    assert s.text().startswith("QR")


def test_emoji_split_over_two_gens(server: FakeServer, backend: StateBackend) -> None:
    """A character cut by max_tokens is whole again once its other bytes are sampled."""
    ids = TOOL.encode("🙂🚀!", False)
    assert len(ids) == 9
    server.say(ids[:2], ids[2:])
    s = run(backend, "x", gen("a", max_tokens=2), gen("b", max_tokens=7))
    assert s["a"] == "\ufffd"
    assert s["b"] == "🙂🚀!"
    assert s.text() == "x🙂🚀!"


words = st.sampled_from([*TEXT.split(), "🙂", "日本", " ", "STOP", "é"])


@settings(max_examples=300, deadline=None)
@given(st.lists(words, min_size=1, max_size=8), st.lists(words, max_size=3), st.data())
def test_settle_is_exact(said: list[str], before: list[str], data: Any) -> None:
    """For any text and any stop: kept ids + left-over characters are the trimmed text."""
    ids = TOOL.encode(" ".join(said), False)
    cut = data.draw(st.integers(0, len(ids)))
    ids = ids[: len(ids) - cut // 2]
    text = TOOL.decode(ids)
    at = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stop = text[at : at + data.draw(st.integers(1, 4))]
    prompt = TOOL.encode("".join(before), False)
    reason = {"type": "stop", "matched": stop} if stop else {"type": "length"}
    settled = TOOL.settle(prompt, ids, reason, [stop])
    expected = text[: text.find(stop)] if stop else text
    assert settled.text == expected
    assert TOOL.decode(ids[: settled.kept]) + settled.left_over == expected
    if settled.kept < len(ids):
        longer = TOOL.decode(ids[: settled.kept + 1])
        assert not expected.startswith(longer) or settled.left_over == ""


@pytest.mark.parametrize(
    ("text", "stops", "spoken"),
    [
        ("abc", [], "abc"),
        ("abcST", ["STOP"], "abc"),
        ("abcSTOPx", ["STOP"], "abc"),
        ("abcS\ufffd", ["STOP"], "abcS"),
        ("ab\n", ["\n\n", "b\nc"], "a"),
    ],
)
def test_nothing_is_spoken_that_is_taken_back(text: str, stops: list[str], spoken: str) -> None:
    """A stream that shows half a stop string or half a character cannot take it back."""
    assert TOOL.speakable(text, stops) == spoken
