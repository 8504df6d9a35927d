"""Token exactness with SmolLM2's tokenizer: the fake server says chosen ids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_rwttt import assistant, function, gen, gen_int, gen_string, user
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.http import load_tokenizer
from sgl_rwttt.lang.state import State
from sgl_rwttt.lang.text import TokenText
from sgl_rwttt.models.embedded import ensure

from .fake_transport import CHUNK, FakeServer, FakeTransport, Json

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(ensure(progress=False)))


@pytest.fixture
def server(tokenizer: Any) -> FakeServer:
    made = FakeServer()
    made.tokenizer = tokenizer
    return made


def ids_of(server: FakeServer, text: str) -> list[int]:
    return list(server.tokenizer.encode(text, add_special_tokens=False))


def requests(server: FakeServer) -> list[Json]:
    return [payload for op, payload in server.log if op == "generate"]


def check(s: State) -> None:
    """decode(ledger) + pending == text, and the pending text is what no token of it is."""
    text = s.stream_executor.backend.text
    assert text.decode(s.tokens) + s.pending == s.text()


def run(backend: StateBackend, *parts: Any, stream: bool = False) -> State:
    """Say the parts one by one, and check the invariant after each and the stream as a whole."""

    @function
    def program(s: State) -> None:
        for part in parts:
            s += part
            if not stream:
                check(s)

    s = program.run(backend=backend, temperature=0, stream=stream)
    pieces = list(s.text_iter())
    assert "".join(pieces) == s.text()
    check(s)
    return s


streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@streamed
@pytest.mark.parametrize(
    ("said", "stop", "kept"),
    [
        ("The weather is unbelievable today", "believ", "The weather is un"),
        ("One two three STOP HERE now", " STOP HERE", "One two three"),
        ("One two three STOP HERE now", "HERE", "One two three STOP "),
        ("a b c d e f g h i j k l m STOP", "STOP", "a b c d e f g h i j k l m "),
        ("日本語のテキスト。終わり", "終", "日本語のテキスト。"),
        ("日本語のテキスト。終わり", "本", "日"),
        ("first 🙂🚀 last", "🚀", "first 🙂"),
        ("done", "done", ""),
        ("done.\n\nNext", "\n\n", "done."),
        (" leading", " ", ""),
    ],
)
def test_stop_strings(
    said: str, stop: str, kept: str, stream: bool, server: FakeServer, backend: StateBackend
) -> None:
    """Guards: a stop that is cut from the text and not from the lineage, or too much of it; the
    next fill must be read behind the kept text, with the version that the kept tokens make."""
    server.say(said, " yes")
    s = run(
        backend, "Say: ", gen("a", max_tokens=60, stop=["zzz", stop]), " next",
        gen("b", max_tokens=1), stream=stream,
    )  # fmt: skip
    assert s["a"] == kept
    assert s.text() == f"Say: {kept} next yes"
    _, second = requests(server)
    before = list(s.tokens[: second["session_params"]["offset"]])
    assert server.tokenizer.decode(before + second["input_ids"]) == f"Say: {kept} next"
    sent = ids_of(server, said)
    assert (
        before[len(ids_of(server, "Say: ")) :] == sent[: len(before) - len(ids_of(server, "Say: "))]
    )


@pytest.mark.parametrize("length", range(2 * CHUNK + 2))
def test_stop_behind_a_boundary(length: int, server: FakeServer, backend: StateBackend) -> None:
    """Guards: a head that counts a version which only trimmed tokens completed. The server checks
    the id that each request expects."""
    word = ids_of(server, " the")
    assert len(word) == 1
    server.say(word * length + ids_of(server, " full STOP"))
    s = run(
        backend, "Q", gen("a", max_tokens=99, stop=" full STOP"), " more", gen("z", max_tokens=2)
    )
    assert s["a"] == " the" * length
    assert s.version * CHUNK + s.tail == s.position


@streamed
def test_ends_are_trimmed_once(stream: bool, server: FakeServer, backend: StateBackend) -> None:
    """Guards: EOS or a stop id left in the lineage, where the role's suffix says it again."""
    eos = server.tokenizer.eos_token_id
    *_, seven = no = ids_of(server, "No 7")
    server.say([*ids_of(server, "Yes"), eos], no, [eos])
    s = run(
        backend, user("A"), assistant(gen("a")), user("B"),
        assistant(gen("b", stop_token_ids=[seven])), assistant(gen("c")), stream=stream,
    )  # fmt: skip
    assert (s["a"], s["b"], s["c"]) == ("Yes", "No ", "")
    ends = [*s.tokens, *ids_of(server, s.pending)].count(eos)
    assert ends == 6, "one suffix for each role, the default system message's too"
    assert "<|im_end|><|im_end|>" not in s.text()


@streamed
@pytest.mark.parametrize("text", ["🙂🚀!", "日本語です", "é🙂", "👩‍👩‍👧 family"])
def test_characters_cut_at_max_tokens(
    text: str, stream: bool, server: FakeServer, backend: StateBackend
) -> None:
    """Guards: halves of a character encoded as U+FFFD, counted twice, or said and taken back."""
    ids = ids_of(server, text)
    for cut in range(1, len(ids)):
        server.say(ids[:cut], ids[cut:])
        s = run(
            backend, "x", gen("a", max_tokens=cut), gen("b", max_tokens=len(ids) - cut),
            " then", gen("c", max_tokens=2), stream=stream,
        )  # fmt: skip
        assert s.text().startswith("x" + text + " then")
        server.say(ids[:cut])
        s = run(backend, "x", gen("a", max_tokens=cut), " then", stream=stream)
        assert s.text() == "x" + s["a"] + " then"
        assert s["a"] == server.tokenizer.decode(ids[:cut])


def test_a_hole_that_stays_is_said_once(server: FakeServer, backend: StateBackend) -> None:
    """Guards: the next answer beginning with the half character of the one before."""
    half = ids_of(server, "🙂")[:1]
    server.say(half, "Yes", half * 9, half, "No")
    s = run(
        backend, "Q\ufffd", gen("z", max_tokens=1), gen("a", max_tokens=1),
        "🙂", gen("b", max_tokens=9), gen("c", max_tokens=1), gen("d", max_tokens=1),
    )  # fmt: skip
    assert (s["a"], s["d"]) == ("Yes", "No")
    assert "🙂" in s.text()


def test_a_stop_that_cuts_a_character_begun_before(
    server: FakeServer, backend: StateBackend
) -> None:
    """Guards: text and ledger that part when no kept token ends where the stop begins."""
    ids = ids_of(server, "日本")
    server.say(ids[:1], ids[1:])
    s = run(backend, "x", gen("a", max_tokens=1), gen("b", max_tokens=9, stop="本"), " then")
    assert s.text().endswith(" then")


def test_split_fills_are_one_encoding(server: FakeServer, backend: StateBackend) -> None:
    """Guards: ids that depend on where a program cut its text."""
    whole = "The unbelievable weather 日本 🙂\n\n  x = 1\n"
    tokens = [
        run(backend, *(whole[i : i + n] for i in range(0, len(whole), n)), gen("a", max_tokens=1))
        .tokens[: len(ids_of(server, whole))]
        for n in (1, 2, 3, 7, len(whole))
    ]  # fmt: skip
    assert set(tokens) == {tuple(ids_of(server, whole))}


def test_special_tokens_are_the_programs_own(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a BOS or EOS that the tokenizer adds in the middle of a lineage."""
    s = run(backend, user("A"), assistant("B"), "C", gen("a", max_tokens=1), "D")
    start, end = (server.tokenizer.convert_tokens_to_ids(f"<|im_{w}|>") for w in ("start", "end"))
    tokens = [*s.tokens, *ids_of(server, s.pending)]
    assert (tokens.count(start), tokens.count(end)) == (3, 3), "with the default system message"


@streamed
def test_typed_answers(stream: bool, server: FakeServer, backend: StateBackend) -> None:
    """Guards: a constrained answer whose ending blank stays in the lineage, or a closing quote
    that is trimmed like EOS."""
    server.say("42 apples", '"blue"', "yes")
    s = run(
        backend, "N: ", gen_int("n"), ", colour ", gen_string("c", max_tokens=3), ": ",
        gen("r", regex="yes|no", max_tokens=1), ".", stream=stream,
    )  # fmt: skip
    assert s["n"] == "42"
    assert s["c"] == server.tokenizer.decode(ids_of(server, '"blue"')[:3])
    assert s.text() == f"N: 42, colour {s['c']}: {s['r']}."
    sent = [p["sampling_params"] for p in requests(server)]
    assert sent[0]["regex"].startswith("[-+]?") and sent[2]["regex"] == "yes|no"


@streamed
def test_empty_answers(stream: bool, server: FakeServer, backend: StateBackend) -> None:
    """Guards: a head that moves for an answer of which nothing is left."""
    eos = server.tokenizer.eos_token_id
    server.say([eos], "STOP", [eos], " end")
    s = run(
        backend, "Q", gen("a"), gen("b", stop="STOP"), gen("c"), "R", gen("d", max_tokens=1),
        stream=stream,
    )  # fmt: skip
    assert (s["a"], s["b"], s["c"], s["d"]) == ("", "", "", " end")
    assert s.text() == "QR end"
    assert list(s.tokens) == [*ids_of(server, "Q"), *ids_of(server, "R"), *ids_of(server, " end")]


# Any ids at all


def made(tokenizer: Any) -> tuple[FakeServer, StateBackend]:
    server = FakeServer()
    server.tokenizer = tokenizer
    return server, StateBackend(FakeTransport(server))


@pytest.fixture(scope="module")
def odd_ids(tokenizer: Any) -> list[int]:
    """Ids that decode to no text of their own, or to several characters and a half."""
    text = TokenText(tokenizer)
    return [i for i in range(len(tokenizer)) if "\ufffd" in text.decode([i])]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data(), stream=st.booleans())
def test_whatever_the_model_says(
    data: Any, stream: bool, tokenizer: Any, odd_ids: list[int]
) -> None:
    """Guards: bytes that are no text, in any order, over several gens with stops between fills."""
    server, backend = made(tokenizer)
    one = st.sampled_from(odd_ids) | st.integers(3, len(tokenizer) - 1)
    parts: list[Any] = ["Q"]
    scripts: list[list[int]] = []
    for i in range(data.draw(st.integers(1, 4))):
        ids = data.draw(st.lists(one, min_size=1, max_size=10))
        stop = data.draw(
            st.sampled_from(["zzz", tokenizer.decode(ids[-2:]).strip("\ufffd") or "z"])
        )
        scripts.append(ids)
        parts.append(gen(f"g{i}", max_tokens=len(ids), stop=stop))
        if data.draw(st.booleans()):
            parts.append(data.draw(st.sampled_from(["R", "日", "\ufffd", " "])))
    server.scripts = list(scripts)
    s = run(backend, *parts, gen("z", max_tokens=1))
    if stream:
        server.scripts = scripts
        t = run(backend, *parts, gen("z", max_tokens=1), stream=True)
        assert (t.tokens, t.text()) == (s.tokens, s.text())
