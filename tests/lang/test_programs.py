"""Token-exactness: what the client believes of a lineage is what the server has."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest

from sgl_rwttt import assistant, function, gen, select, system, user
from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.state import State

from .conftest import check_text
from .fake_transport import FakeServer, FakeTransport


def plain(s: Any) -> None:
    s += "The model reads" + gen("a", max_tokens=9) + " Stop words. " + gen("z", max_tokens=5)


def chat(s: Any) -> None:
    s += system("Be brief 🙂.")
    for i in range(3):
        s += user(f"日本語 {i}?")
        s += assistant(gen(f"a{i}", max_tokens=7))
    s += user("é") + assistant(gen("z", max_tokens=4))


def adjacent_gens(s: Any) -> None:
    s += "x" + gen("a", max_tokens=3) + gen("b", max_tokens=3) + gen("z", max_tokens=3)


def selecting(s: Any) -> None:
    s += "Yes or no? " + select("a", ["yes", "no", "perhaps not"]) + ". " + gen("z", max_tokens=3)


def selecting_twice(s: Any) -> None:
    s += "Which" + select("a", [" one", " two"]) + select("b", [" keeps", " reads"])
    s += gen("z", max_tokens=12)


def best_of(s: Any) -> None:
    s += user("A question")
    with s.fork(3) as branches:
        branches += assistant(gen("a", max_tokens=10, temperature=0.9))
        s.keep(branches.best("a"))
    s += user("So?") + assistant(gen("z", max_tokens=4))


def going_back(s: Any) -> None:
    s += user("One") + assistant(gen("a", max_tokens=6))
    here = s.checkpoint()
    s += user("Two") + assistant(gen("b", max_tokens=11))
    s.rollback(here)
    s += user("Three") + assistant(gen("z", max_tokens=6))


def var_scope(s: Any) -> None:
    with s.var_scope("both"):
        s += "The " + gen("a", max_tokens=2)
    s += " end" + gen("z", max_tokens=2)


PROGRAMS = [
    plain,
    chat,
    adjacent_gens,
    selecting,
    selecting_twice,
    best_of,
    going_back,
    var_scope,
]


@pytest.mark.parametrize("adds_bos", [False, True], ids=["no_bos", "bos"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_ledger_decodes_to_the_text(program: Callable[[Any], None], adds_bos: bool) -> None:
    """A token that was encoded again, doubled or lost would change the text behind the ledger."""
    server = FakeServer(adds_bos=adds_bos)
    backend = StateBackend(FakeTransport(server))
    s = function(program).run(backend=backend, temperature=0)
    if adds_bos:
        assert s.tokens[0] == backend.text.prefix[0] and s.tokens.count(s.tokens[0]) == 1
        s.stream_executor.text_ = "<s>" + s.stream_executor.text_
    check_text(s)
    assert not server.sessions


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_last_gen_equals_a_plain_request(
    program: Callable[[Any], None], server: FakeServer, backend: StateBackend
) -> None:
    """State is a function of the ids: one request with the ledger's ids must say the same."""

    def wrapped(s: State) -> None:
        program(s)
        s.sync()

    s = function(wrapped).run(backend=backend, temperature=0)
    kept = s.get_meta_info("z")["kept_tokens"]
    *_, generates = [payload for op, payload in server.log if op == "generate"]
    limit = generates["sampling_params"]["max_new_tokens"]
    ids = list(s.tokens[: len(s.tokens) - kept])
    assert all(mode == "write" for *_, mode in s.lineage.modes)
    opened = server.control("open", {})
    answer = backend.transport.generate(
        {
            "input_ids": ids,
            "rid": uuid.uuid4().hex,
            "session_params": {"id": opened["owner"]},
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": limit,
                "custom_params": {"ttt_mode": "write"},
            },
        }
    )
    server.control("close", {"owner": opened["owner"]})
    assert answer["output_ids"][:kept] == list(s.tokens[len(ids) :])


def test_split_fill_equals_joined_fill(server: FakeServer, backend: StateBackend) -> None:
    """Tokenising each `+=` alone would make the ids depend on how the program was written."""

    @function
    def split(s: State) -> None:
        for part in ("The mod", "el re", "ads. S", "top ", "🙂"):
            s += part
        s += gen("a", max_tokens=4)

    @function
    def joined(s: State) -> None:
        s += "The model reads. Stop 🙂" + gen("a", max_tokens=4)

    one = split.run(backend=backend, temperature=0)
    two = joined.run(backend=backend, temperature=0)
    assert one.tokens == two.tokens
    assert one.state_id == two.state_id
    assert len([op for op, _ in server.log if op == "generate"]) == 2


def test_state_id_is_the_servers(server: FakeServer, backend: StateBackend) -> None:
    """The report after a flush must be the client's own id, position, version and tail."""

    @function
    def program(s: State) -> tuple[Any, ...]:
        s += "The model keeps what it reads. " + gen("a", max_tokens=13)
        s.flush()
        report = server.clock(server.root, 0, *_node(server, s)).state_id.hex()
        assert s.state_id == report
        return s.version, s.tail, s.position

    version, tail, position = program.run(backend=backend, temperature=0).ret_value
    assert version * server.chunk + tail == position


def _node(server: FakeServer, s: State) -> Any:
    node = server.sessions[s.owner].nodes[s.branch or ""]
    return node.tokens, node.modes


def test_special_tokens_of_roles_are_single_tokens(
    server: FakeServer, backend: StateBackend
) -> None:
    """A role marker tokenised as plain characters is a prompt that the model never saw."""

    @function
    def program(s: State) -> None:
        s += user("Hi") + assistant(gen("a", max_tokens=2))

    s = program.run(backend=backend, temperature=0)
    start, end = (server.tokenizer.convert_tokens_to_ids(f"<|im_{w}|>") for w in ("start", "end"))
    assert s.tokens[0] == start
    assert s.tokens.count(start) == 2
    assert end in s.tokens


def test_default_system_prompt_comes_from_the_models_own_template() -> None:
    """SGLang guesses a template by the path; a chat model then misses its system message."""
    from sgl_rwttt.lang.chat import chat_template

    from .toy_tokenizer import toy_tokenizer

    class WithSystem:
        chat_template = "<|im_start|>"

        def apply_chat_template(self, messages: Any, tokenize: bool) -> str:
            body = str(toy_tokenizer().apply_chat_template(messages, tokenize=False))
            return "<|im_start|>system\nBe kind.<|im_end|>\n" + body

    assert chat_template(None, "anywhere", WithSystem()).default_system_prompt == "Be kind."
    assert chat_template(None, "anywhere", toy_tokenizer()).name == "chatml"
    assert chat_template("llama-3-instruct", "x", toy_tokenizer()).name == "llama-3-instruct"
    assert chat_template(None, "Llama-3-8B-Instruct", object()).name == "llama-3-instruct"


def test_a_rank_is_asked_for_when_the_owner_is_opened(
    server: FakeServer, backend: StateBackend
) -> None:
    """Guards `run(rank=...)`: an argument that goes to the program, or nowhere."""

    def program(s: State) -> None:
        s += "x" + gen("a", max_tokens=2)

    opened = []
    for rank in (None, 4):
        function(program).run(backend=backend, rank=rank)
        opened.append([args for op, args in server.log if op == "open"][-1])
    assert [args.get("rank", "none") for args in opened] == ["none", 4]
