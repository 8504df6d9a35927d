"""Programs on the real model, in the real runtime, in process and over a socket."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sgl_rwttt as rw
from examples import adapt_and_fork as demo
from sgl_rwttt import assistant, gen, select, user
from sgl_rwttt.lang import siblings
from tests.engine.preloaded import forking
from tests.engine.server import Server, cli, free_port, serving

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of snapshots for both servers."""
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def engine(snapshots: Path) -> Iterator[rw.Engine]:
    with forking():
        backend = rw.Engine(
            max_total_tokens=8192,
            ttt_memory_mb=512,
            ttt_snapshot_dir=str(snapshots),
            port=free_port(),
        )
    yield backend
    with forking():
        backend.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, snapshots: Path) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("embedded") / "log"
    flags = ("--max-total-tokens", "8192", "--ttt-memory-mb", "512")
    flags = (*flags, "--snapshot-dir", str(snapshots))
    with serving(cli("serve", "embedded", *flags), log) as running:
        yield running


@pytest.fixture(scope="module")
def runtime(server: Server) -> Iterator[rw.Runtime]:
    backend = rw.Runtime(server.url)
    yield backend
    backend.shutdown()


@pytest.fixture(autouse=True)
def balanced(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test must leave no owner, root or pin behind."""
    yield
    for name in ("engine", "runtime"):
        if name in request.fixturenames:
            backend = request.getfixturevalue(name)
            deadline = time.monotonic() + 5  # a streamed run closes its owner after its last text
            while (info := backend.get_server_info())["sessions"] and time.monotonic() < deadline:
                time.sleep(0.05)
            left = {k: info["store"][k] for k in ("owners", "roots", "pins")}
            assert info["integrity_checked"]
            assert left == {"owners": 0, "roots": 0, "pins": 0}
            assert info["sessions"] == 0


@rw.function
def chat(s: rw.State) -> None:
    s += user("Name a colour. One word.")
    s += assistant(gen("a", max_tokens=8, temperature=0))
    s += user("And another one?")
    s += assistant(gen("b", max_tokens=8, temperature=0))


@rw.function
def stops(s: rw.State) -> None:
    s += "One, two, three, four, five, six, seven"
    s += gen("a", max_tokens=40, temperature=0, stop=["twelve", "."])
    s += " and so on:" + gen("b", max_tokens=12, temperature=0)


@rw.function
def unicode_text(s: rw.State) -> None:
    s += "日本語と 😀 emoji: " + gen("a", max_tokens=24, temperature=0)


@rw.function
def branching(s: rw.State) -> None:
    s += user("Is the sky green?")
    here = s.checkpoint("asked")
    s += assistant(gen("first", max_tokens=12, temperature=0))
    s.rollback(here)
    with s.fork(3) as branches:
        branches += [
            assistant(hint + gen("a", max_tokens=8, temperature=0)) for hint in ("", "Yes", "No")
        ]
        s.keep(branches.best("a"))
    s += user("Sure?") + assistant(select("sure", ["yes", "no"]))


@rw.function
def frozen_and_adapted(s: rw.State) -> None:
    s.adapt(demo.text("glossary")[:600])
    with s.frozen():
        s += user("What is a blorp?") + assistant(gen("a", max_tokens=12, temperature=0))
    s += user("Thanks.") + assistant(gen("b", max_tokens=8, temperature=0))
    s.clear_context()
    s += "A new context: " + gen("c", max_tokens=8, temperature=0)


PROGRAMS = [chat, stops, unicode_text, branching, frozen_and_adapted]


def outcome(program: Any, backend: Any) -> dict[str, Any]:
    """Everything about a run that must not depend on the way to the server."""
    s = program.run(backend=backend, keep=True)
    try:
        return {
            "text": s.text(),
            "tokens": s.tokens,
            "pending": s.pending,
            "state_id": s.state_id,
            "version": s.version,
            "variables": {k: s[k] for k in ("a", "b", "c", "first", "sure") if k in s},
        }
    finally:
        s.release()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.func.__name__)
def test_equal_in_process_and_over_http(
    program: Any, engine: rw.Engine, runtime: rw.Runtime
) -> None:
    """Guards: another lineage, other ids or another text on one of the two ways."""
    here, there = outcome(program, engine), outcome(program, runtime)
    assert here == there
    assert all(here["variables"].values())


@pytest.mark.parametrize("program", PROGRAMS[:3], ids=lambda p: p.func.__name__)
def test_the_ledger_is_the_text(program: Any, engine: rw.Engine) -> None:
    """Guards: text re-tokenised on the way, a stop left in the lineage, a split character."""
    s = program.run(backend=engine, keep=True)
    try:
        assert engine.text.decode(list(s.tokens)) + s.pending == s.text()
    finally:
        s.release()


def test_last_gen_equals_a_plain_request(engine: rw.Engine) -> None:
    """Guards: a conversation's state differing from one prefill of the same ids."""
    s = chat.run(backend=engine, keep=True)
    tokens, answer = list(s.tokens), engine.text.encode(s["b"], False)
    s.release()
    ends = [i for i in range(len(tokens)) if tokens[i : i + len(answer)] == answer]
    start = ends[-1]
    sampling = {"temperature": 0, "max_new_tokens": len(answer)}
    plain = engine.transport.generate({"input_ids": tokens[:start], "sampling_params": sampling})
    assert plain["output_ids"] == tokens[start : start + len(answer)]


def test_the_demo_tells_the_truth(engine: rw.Engine) -> None:
    """Guards: adaptation that does nothing, leaks into other texts, or survives a rollback."""
    s = demo.adapt_and_fork.run(
        document=demo.text("glossary"),
        other=demo.text("code"),
        unrelated=demo.text("prose"),
        backend=engine,
    )
    before, after, fork, parent, back = s.ret_value
    assert after.document.mean / before.document.mean < 0.95
    assert abs(after.unrelated.mean / before.unrelated.mean - 1) < 0.02
    assert fork.document.mean / before.document.mean > 0.97
    assert (parent.document, parent.state_id) == (after.document, after.state_id)
    assert (back.document, back.unrelated, back.state_id) == (
        before.document,
        before.unrelated,
        before.state_id,
    )
    assert after.version > before.version == back.version


def test_the_readme_example(engine: rw.Engine, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: a first example that does not work as pasted."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    rw.set_default_backend(engine)
    try:
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    finally:
        rw.set_default_backend(None)
    answer, sure, version = capsys.readouterr().out.split("|")
    assert answer.strip() and sure.strip()
    assert int(version.split()[1]) >= 2


def test_contradictory_owners_in_one_batch(engine: rw.Engine) -> None:
    """Guards: one owner's evidence in another's weights: interleaved equals alone, 100 tokens."""
    documents = [
        "In this town the river is called Anna and the mountain is called Bertha. " * 8,
        "In this town the river is called Bertha and the mountain is called Anna. " * 8,
    ]
    prompts = [engine.text.encode(text, True) for text in documents]
    sampling = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
    payloads = [{"input_ids": ids, "sampling_params": sampling} for ids in prompts]
    alone = [engine.transport.generate(dict(p)) for p in payloads]
    together = engine.transport.generate_batch(
        {"input_ids": prompts, "sampling_params": [sampling, sampling]}
    )
    for solo, shared in zip(alone, together, strict=True):
        assert len(shared["output_ids"]) == 100
        assert shared["output_ids"] == solo["output_ids"]
        assert shared["meta_info"]["state"]["state_id"] == solo["meta_info"]["state"]["state_id"]
    assert alone[0]["output_ids"] != alone[1]["output_ids"]


def test_openai_routes(server: Server, runtime: rw.Runtime) -> None:
    """Guards: a chat completion that fails on a TTT checkpoint, or leaves state behind."""
    body = {
        "model": "any",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 40,
        "temperature": 0,
    }
    first = server.post("/v1/chat/completions", body)
    assert first.status_code == 200, first.text
    text = first.json()["choices"][0]["message"]["content"]
    assert "Paris" in text
    again = server.post("/v1/chat/completions", body).json()
    assert again["choices"][0]["message"]["content"] == text
    completed = server.post(
        "/v1/completions", {"model": "any", "prompt": "One two", "max_tokens": 4}
    )
    assert completed.status_code == 200


def test_concurrent_programs(runtime: rw.Runtime) -> None:
    """Guards: programs that get each other's branches when they run at once."""

    @rw.function
    def ask(s: rw.State, n: int) -> str:
        s += f"Item {n}: the number {n} is" + gen("a", max_tokens=6, temperature=0)
        return str(s["a"])

    alone = [ask.run(n=n, backend=runtime).ret_value for n in range(6)]

    async def together() -> list[Any]:
        return await asyncio.gather(*(ask.arun(n=n, backend=runtime) for n in range(6)))

    assert [s.ret_value for s in asyncio.run(together())] == alone
    rows: list[Any] = [{"n": n} for n in range(6)]
    rows[2] = {"m": 1}
    batch = ask.run_batch(rows, on_error="return", backend=runtime)
    assert isinstance(batch[2], TypeError)
    assert [s.ret_value for i, s in enumerate(batch) if i != 2] == alone[:2] + alone[3:]


def prefills(log: str) -> list[tuple[int, int, int]]:
    """(requests, new tokens, cached tokens) of the prefill batches that SGLang logged."""
    line = r"Prefill batch, #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+)"
    return [(int(n), int(new), int(hit)) for n, new, hit in re.findall(line, log)]


def of_length(text: str, length: int, backend: Any) -> str:
    """The beginning of `text` that has so many tokens."""
    ids = backend.text.encode(text, False)[:length]
    cut = str(backend.text.decode(ids))
    assert len(ids) == length and backend.text.encode(cut, False) == ids
    return cut


def test_sixteen_siblings_in_one_prefill(
    server: Server, runtime: rw.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a fork that prefills its lineage again, branch by branch, or copies its pages."""
    monkeypatch.setattr(siblings, "WAIT_S", 5.0)  # on a busy machine too
    document = of_length("".join(map(demo.text, ("prose", "code", "glossary"))) * 2, 2000, runtime)
    own = [f" Number {i}:" for i in range(16)]

    @rw.function
    def sixteen(s: rw.State) -> None:
        s += document
        s.flush()
        assert s.position == 2000 and s.tail == 2000 % 32
        before, seen = runtime.get_server_info()["store"], server.log.stat().st_size
        with s.fork(16) as branches:
            branches += [text + gen("a", max_tokens=3, temperature=0) for text in own]
            metas = [branch.get_meta_info("a") for branch in branches]
            after = runtime.get_server_info()["store"]
        assert [meta["cached_tokens"] for meta in metas] == [2000] * 16
        new = sum(len(runtime.text.encode(text, False)) for text in own)
        log = server.log.read_bytes()[seen:].decode(errors="replace")
        assert prefills(log) == [(16, new, 16 * 2000)]
        assert after["copies"] - before["copies"] == 16
        assert after["pages_live"] - before["pages_live"] <= 16

    sixteen.run(backend=runtime)


def test_branches_reuse_all_that_their_parent_read(engine: rw.Engine) -> None:
    """Guards: KV that a fork cannot reuse because of where or how its parent stands.

    A branch that says nothing reads the last token again, for its logits. Behind a boundary it
    reads the last chunk: the tail of that chunk is not retained, it became a version.
    """
    found: dict[str, tuple[list[int], int]] = {}

    def fork(s: rw.State, what: str, text: str | None = None) -> None:
        s.flush()
        with s.fork(2) as branches:
            # No two forks at one place say the same: what earlier branches read stays in the cache.
            branches += (f" {what}" if text is None else text) + gen("a", max_tokens=2)
            hits = [b.get_meta_info("a")["cached_tokens"] for b in branches]
            found[what] = hits, s.position

    @rw.function
    def program(s: rw.State, document: str) -> None:
        s += document
        fork(s, "in a chunk")
        s.checkpoint("here")
        with s.frozen():
            fork(s, "frozen")
            s += " It is said that"
            fork(s, "behind frozen tokens")
            fork(s, "nothing said, frozen", "")
        s += gen("b", max_tokens=6, temperature=0)
        fork(s, "behind a gen")
        s += " Yes or no? " + select("c", ["yes", "no"])
        fork(s, "behind a select")
        with s.fork(2) as branches:
            branches += [" one", " two" + gen("b", max_tokens=3, temperature=0)]
            fork(branches[1], "a branch of a branch")
            s.keep(branches[1])
        fork(s, "kept")
        s.rollback("here")
        fork(s, "rolled back")
        fork(s, "nothing said", "")

    @rw.function
    def boundary(s: rw.State, document: str) -> None:
        s += document
        fork(s, "at a boundary")
        fork(s, "nothing said at a boundary", "")

    text = demo.text("glossary")
    program.run(document=of_length(text, 140, engine), backend=engine)
    boundary.run(document=of_length(demo.text("prose"), 160, engine), backend=engine)
    missed = {what: {at - hit for hit in hits} for what, (hits, at) in found.items()}
    assert len(missed) == 12
    assert missed.pop("nothing said at a boundary") == {32}
    for what, tokens in missed.items():
        assert tokens == ({1} if what.startswith("nothing") else {0}), (what, tokens)


def test_siblings_answer_as_they_would_alone(engine: rw.Engine, runtime: rw.Runtime) -> None:
    """Guards: sampling parameters, stops or errors of another sibling."""

    @rw.function
    def program(s: rw.State, together: bool) -> Any:
        s += "Count: one, two,"
        with s.fork(4) as branches:
            parts = [
                gen("a", max_tokens=6, temperature=0),
                " three" + gen("a", max_tokens=9, temperature=0, stop=[" six", "."]),
                gen("a", max_tokens=8, temperature=0, regex="[0-9]{3}"),
            ]
            if together:
                branches += [*parts, "x " * 9000 + gen("a", max_tokens=1)]
                too_long = branches[3].stream_executor.error()
                assert isinstance(too_long, rw.StateError) and "9001" in str(too_long)
            else:
                for branch, part in zip(branches, parts, strict=False):
                    branch += part
                    branch.sync()
            metas = [b.get_meta_info("a") for b in branches[:3]]
            scores = [[x[1] for x in meta["output_token_logprobs"]] for meta in metas]
            return [(b["a"], b.state_id, ids) for b, ids in zip(branches, scores, strict=False)]

    alone = program.run(False, backend=engine).ret_value
    for backend in (engine, runtime):
        for stream in (False, True):
            s = program.run(True, backend=backend, stream=stream)
            assert "".join(s.text_iter()) == "Count: one, two,"
            assert s.ret_value == alone


@rw.function
def study(s: rw.State, name: str) -> Any:
    s += demo.text("glossary")[:1200]
    s.snapshot(name)
    s.clear_context()
    s += user("What is a delta page?") + assistant(gen("a", max_tokens=16, temperature=0))
    return s["a"], s.version, s.state_id


@rw.function
def recall(s: rw.State) -> Any:
    s += user("What is a delta page?") + assistant(gen("a", max_tokens=16, temperature=0))
    return s["a"], s.version, s.state_id


def test_save_in_process_and_go_on_over_http(engine: rw.Engine, runtime: rw.Runtime) -> None:
    """Guards: a snapshot that another server answers differently, or only the fake transport can
    restore."""
    there = study.run("tutor", backend=engine).ret_value
    assert there[1] > 1
    assert recall.run(backend=engine).ret_value != there
    for backend in (engine, runtime):
        assert recall.run(backend=backend, state="tutor").ret_value == there
