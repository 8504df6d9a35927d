"""Programs on the real engine, in process and over HTTP, on a tiny checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import sgl_rwttt as rw
from sgl_rwttt import ServerGone, assistant, function, gen, gen_int, select, user
from sgl_rwttt.lang.state import State
from sgl_rwttt.srt_ext.launch import fresh_environment
from tests.benchmarks.scripts import load
from tests.engine.server import free_port

from .conftest import check_text
from .oracle import World
from .plain_requests import PlainAnswers, held_by_oracle, held_by_server
from .test_programs import PROGRAMS
from .toy_tokenizer import toy_tokenizer
from .walk import Walk, programs, view_of_branch, view_of_state

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

GOLDEN = Path(__file__).parents[1] / "data" / "golden" / "llama_hidden_proj"
GREEDY = [program for program in PROGRAMS if program.__name__ != "best_of"]
OPTIONS = {"max_total_tokens": 4096, "max_running_requests": 32}
DOC = "A state is a function of the exact token sequence. The model keeps what it reads."


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest golden checkpoint, with the toy tokenizer and a vocabulary of 512."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("model") / "toy"
    shutil.copytree(GOLDEN, folder, ignore=shutil.ignore_patterns("expected"))
    config = json.loads((folder / "config.json").read_text())
    tokenizer = toy_tokenizer()
    config.update(
        vocab_size=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        ttt_lr=0.3,
        max_position_embeddings=4096,
    )
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shape = (512, weights[name].shape[1])
        weights[name] = torch.randn(shape, generator=generator)
    save_file(weights, folder / "model.safetensors")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the snapshots, shared by both servers."""
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def engine(checkpoint: Path, folder: Path) -> Iterator[rw.Engine]:
    options = {"ttt_memory_mb": 64, "ttt_snapshot_dir": str(folder), **OPTIONS}
    made = rw.Engine(str(checkpoint), port=free_port(), **options)
    yield made
    made.shutdown()


@pytest.fixture
def balanced(engine: rw.Engine) -> Iterator[rw.Engine]:
    """After every test nothing of its runs may be left on the server."""
    yield engine
    deadline = time.monotonic() + 5
    while (info := engine.transport.info())["running"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert info["integrity_checked"]
    assert info["sessions"] == 0
    assert {k: info["store"][k] for k in ("owners", "roots", "pins")} == {
        "owners": 0,
        "roots": 0,
        "pins": 0,
    }


class Server:
    """`sgl-rwttt serve` in a process group of its own."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        flags = [f"--port={port}", "--ttt-memory-mb=64", "--log-level=error"]
        flags += [f"--{k.replace('_', '-')}={v}" for k, v in OPTIONS.items()]
        flags.append(f"--ttt-snapshot-dir={folder}")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sgl_rwttt.cli.main", "serve", str(checkpoint), *flags],
            env=fresh_environment(),
            start_new_session=True,
        )

    def wait(self, tokenizer_path: Path) -> rw.Runtime:
        deadline = time.monotonic() + 300
        while True:
            try:
                return rw.Runtime(self.url, tokenizer_path=str(tokenizer_path))
            except rw.StateError:
                assert self.process.poll() is None, "the server ended at its start"
                assert time.monotonic() < deadline
                time.sleep(1)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def server(checkpoint: Path, folder: Path) -> Iterator[Server]:
    made = Server(checkpoint, folder)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def runtime(server: Server, checkpoint: Path) -> rw.Runtime:
    return server.wait(checkpoint)


def plain_request(backend: rw.StateBackend, ids: list[int], **options: Any) -> Any:
    """One request with token ids, outside every program."""
    opened = backend.transport.control("open", {})
    sampling = {"temperature": 0, "ignore_eos": True, "custom_params": {"ttt_mode": "write"}}
    payload = {
        "input_ids": ids,
        "rid": uuid.uuid4().hex,
        "session_params": {"id": opened["owner"]},
        "sampling_params": {**sampling, **options.pop("sampling", {})},
        **options,
    }
    try:
        return backend.transport.generate(payload)
    finally:
        backend.transport.control("close", {"owner": opened["owner"]})


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_programs(program: Any, balanced: rw.Engine) -> None:
    """Every node's position and state id agree with the ledger, or the run raises."""
    s = function(program).run(backend=balanced, temperature=0)
    check_text(s)
    kept = s.get_meta_info("z")["kept_tokens"]
    ids = list(s.tokens)
    answer = plain_request(balanced, ids[: len(ids) - kept], sampling={"max_new_tokens": kept})
    assert answer["output_ids"] == ids[len(ids) - kept :]


def test_score_is_a_prefill_logprob(balanced: rw.Engine) -> None:
    """A score one token off, or of another state, looks plausible."""

    @function
    def program(s: State) -> Any:
        s += DOC
        s.flush()
        return s.tokens, s.state_id, s.score(" Yes or no?"), s.state_id

    tokens, before, score, after = program.run(backend=balanced).ret_value
    assert before == after
    short = 4  # below a chunk: the root's state, so that read and write mode are equal
    head = program_head(balanced, short, tokens)
    answer = plain_request(
        balanced,
        [*tokens[:short], *head.tokens],
        sampling={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=short - 1,
    )
    expected = [item[0] for item in answer["meta_info"]["input_token_logprobs"][1:]]
    assert head.logprobs == pytest.approx(expected, abs=1e-4)
    assert len(score.tokens) == len(score.logprobs)


def program_head(engine: rw.Engine, n: int, tokens: tuple[int, ...]) -> Any:
    text = engine.text.decode(tokens[:n])

    @function
    def program(s: State) -> Any:
        s += text
        s.flush()
        assert s.tokens == tokens[:n]
        return s.score(" no")

    return program.run(backend=engine).ret_value


def test_branches_do_not_see_each_other(balanced: rw.Engine) -> None:
    """A branch must say what the same lineage says alone."""

    @function
    def forked(s: State) -> list[str]:
        s += DOC
        with s.fork(4) as branches:
            branches += [f" {word}" + gen("a", max_tokens=20) for word in "abcd"]
            return [branch.state_id for branch in branches]

    @function
    def alone(s: State, word: str) -> str:
        s += DOC
        s.flush()
        s += f" {word}" + gen("a", max_tokens=20)
        return s.state_id

    together = forked.run(backend=balanced, temperature=0).ret_value
    one_by_one = [alone.run(word=w, backend=balanced, temperature=0).ret_value for w in "abcd"]
    assert together == one_by_one
    batch = alone.run_batch(
        [{"word": w} for w in "abcd" * 4], backend=balanced, temperature=0, on_error="return"
    )
    assert [s.ret_value for s in batch] == one_by_one * 4


def test_adapt_moves_the_answers(balanced: rw.Engine) -> None:
    """The state an adapt leaves is read by what follows, and a rollback takes it back."""

    @function
    def program(s: State) -> Any:
        first = s.checkpoint()
        s += "The model"
        before = s.score(" keeps what it reads").sum
        s.rollback(first)
        s.adapt(DOC, epochs=3)
        with s.frozen():
            s += "The model"
            after = s.score(" keeps what it reads").sum
        version = s.version
        s.rollback(first)
        s += "The model"
        return before, after, s.score(" keeps what it reads").sum, version

    before, after, again, version = program.run(backend=balanced).ret_value
    assert version > 0
    assert after != pytest.approx(before, abs=1e-3)
    assert again == pytest.approx(before, abs=1e-5)


def test_stream_in_process(balanced: rw.Engine) -> None:
    """The stream's pieces are the answer."""

    @function
    def program(s: State) -> None:
        s += user("Q") + assistant(gen("a", max_tokens=12))

    s = program.run(backend=balanced, stream=True, temperature=0)
    streamed = "".join(s.text_iter("a"))
    assert streamed == s["a"] == program.run(backend=balanced, temperature=0)["a"]


@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(program=programs(in_one_context=True), every=st.booleans())
def test_random_programs(program: Any, every: bool, balanced: rw.Engine) -> None:
    """Guards: ids unlike those of plain requests with the ledger's ids, a version or state id
    unlike the server's, a request or pin that is kept too long or not long enough."""
    world = World(PlainAnswers(balanced))
    view = lambda s: (view_of_branch(s), held_by_oracle(world))  # noqa: E731
    oracle = Walk(view, every, None, is_real=True)
    oracle(world.start(), program)

    @function
    def run(s: State) -> None:
        look = lambda s: (view_of_state(s), held_by_server(balanced, s))  # noqa: E731
        walk = Walk(look, every, oracle.seen, is_real=True)
        walk(s, program)
        assert len(walk.seen) == len(oracle.seen)

    run.run(backend=balanced, temperature=0)


def at_server(backend: rw.StateBackend, s: State) -> Any:
    """The server's own report of the point where a settled branch stands."""
    args = {"owner": s.owner, "rid": s.branch, "offset": s.position}
    report = backend.transport.control("state", args)
    assert report["state_id"] == s.state_id
    assert (report["version"], report["tail"]) == (s.version, s.tail)
    return report["state_id"], report["version"], report["tail"]


def test_rollback_by_k_tokens(balanced: rw.Engine) -> None:
    """Weights, tail and KV must come back over a boundary, at it, and on both sides of it."""

    @function
    def program(s: State) -> None:
        s += DOC
        here = s.checkpoint()
        chunk = s.stream_executor.cursor.ledger.clock.chunk
        before = (s.text(), s.tokens, at_server(balanced, s))
        answers = set()
        crossed = set()
        for k in range(chunk + 2):
            if k:
                s += gen("a", max_tokens=k, ignore_eos=True)
                s.flush()
                crossed.add(at_server(balanced, s)[1] - here.version)
            s.rollback(here)
            assert (s.text(), s.tokens, at_server(balanced, s)) == before
            s += " again" + gen("b", max_tokens=chunk)
            answers.add((s["b"], s.state_id))
            s.rollback()
        assert len(answers) == 1
        assert crossed == {0, 1}, "the gens end on both sides of a boundary"

    program.run(backend=balanced, temperature=0)


def test_peek_and_keep_in_the_servers_books(balanced: rw.Engine) -> None:
    """A peek that moves the state, a loser that stays on the server, a winner that does not."""

    def nodes(s: State) -> int:
        return int(held_by_server(balanced, s)[0])

    @function
    def program(s: State) -> None:
        s += DOC
        s.flush()
        before = at_server(balanced, s)
        with s.peek() as p:
            p += "Is it?" + select("ok", [" yes", " no"]) + gen("why", max_tokens=20)
            p.sync()
            assert at_server(balanced, s) == before
        assert (nodes(s), at_server(balanced, s)) == (1, before)
        with s.fork(4) as branches:
            branches += [f" {i}" + gen("a", max_tokens=4) for i in range(4)]
            best = branches.best("a")
            assert nodes(s) == 1 + 4
            s.keep(best)
        assert nodes(s) == 1 + 1
        s += gen("b", max_tokens=4)
        check_text(s)

    program.run(backend=balanced, temperature=0)


def test_constrained_and_empty_gens(balanced: rw.Engine) -> None:
    """A grammar that ends with its last token has no EOS to trim; no tokens are no text."""

    @function
    def program(s: State) -> None:
        s += DOC + " Yes or no? "
        s += gen("a", regex="(yes|no)", max_tokens=8) + ". "
        s += gen_int("n", max_tokens=6) + "; "
        s += gen("nothing", max_tokens=0) + "and " + gen("z", max_tokens=2)
        check_text(s)

    s = program.run(backend=balanced, temperature=0)
    assert s["a"] in ("yes", "no")
    assert s["n"].strip().lstrip("+-").isdigit()
    assert s["nothing"] == ""
    assert s.text() == f"{DOC} Yes or no? {s['a']}. {s['n']}; and {s['z']}"


def test_errors_keep_their_type_in_process(balanced: rw.Engine) -> None:
    """The engine carries only a message; the type is inside it."""
    with pytest.raises(rw.UnknownOwner):
        balanced.transport.generate(
            {"input_ids": [5], "rid": "r", "session_params": {"id": "nobody"}}
        )
    with pytest.raises(rw.UnknownOwner):
        balanced.transport.control("close", {"owner": "nobody"})
    with pytest.raises(rw.UnsupportedByRule):
        function(lambda s: (s.__iadd__("Q"), s.clear_context(tail="commit"))).run(backend=balanced)
    with pytest.raises(rw.StateError, match=r"(?i)long|length|max"):
        function(lambda s: (s.__iadd__("word " * 5000 + gen("a")), s.sync())).run(backend=balanced)


@pytest.mark.parametrize("program", GREEDY, ids=lambda p: p.__name__)
def test_http_and_engine_give_equal_ids(
    program: Any, balanced: rw.Engine, runtime: rw.Runtime
) -> None:
    """The same program, the same ids and the same state, whichever way it reaches the server."""
    here = function(program).run(backend=balanced, temperature=0)
    there = function(program).run(backend=runtime, temperature=0)
    assert there.tokens == here.tokens
    assert there.state_id == here.state_id


@function
def resumed(s: State) -> Any:
    place = (s.tokens, s.text(), list(s.messages()), s.state_id, s.position, s.version, s.tail)
    s += assistant(gen("b", max_tokens=40, temperature=0)) + user("On")
    s += assistant(gen("c", max_tokens=9, temperature=0))
    check_text(s)
    assert s.get_meta_info("b")["cached_tokens"] >= place[4]
    return place, s["b"], s["c"], s.tokens, s.state_id, s.version


@function
def saved(s: State) -> Any:
    s += user(DOC) + assistant(gen("a", max_tokens=21, temperature=0))
    with s.frozen():
        s += "Is it? " + select("ok", ["yes", "no"])
    here = s.checkpoint("here")
    s += "Taken back" + gen("x", max_tokens=9, temperature=0)
    s.rollback(here)
    s += user("And")
    s.snapshot("talk", kv=True)
    assert s.memory()["context_tokens"] >= s.position
    drawn = rw.tree(s)
    assert s.owner not in drawn
    assert all(name in drawn for name in ("HEAD", "checkpoint here", "gen a", "o  root"))
    return resumed.func(s)


def test_a_program_goes_on_in_another_process(balanced: rw.Engine, runtime: rw.Runtime) -> None:
    """Guards: a context that is another one, or is computed again, behind a snapshot with KV."""
    original = saved.run(backend=balanced).ret_value
    for backend in (balanced, runtime):
        assert resumed.run(backend=backend, state="talk").ret_value == original


def test_http_errors_keep_their_type(runtime: rw.Runtime) -> None:
    """Typed over real HTTP too, on both kinds of routes, streamed or not."""
    with pytest.raises(rw.UnknownOwner):
        runtime.transport.control("close", {"owner": "nobody"})
    payload = {"input_ids": [5], "rid": "r", "session_params": {"id": "nobody"}}
    with pytest.raises(rw.UnknownOwner):
        runtime.transport.generate(payload)
    with pytest.raises(rw.UnknownOwner):
        list(runtime.transport.generate_stream({**payload, "stream": True}))


def test_http_stream(runtime: rw.Runtime) -> None:
    """Server-sent events end with the same answer."""

    @function
    def program(s: State) -> None:
        s += user("Q") + assistant(gen("a", max_tokens=12))

    s = program.run(backend=runtime, stream=True, temperature=0)
    assert "".join(s.text_iter("a")) == program.run(backend=runtime, temperature=0)["a"]


def test_the_benchmarks_siblings(server: Server, runtime: rw.Runtime) -> None:
    """A benchmark that no longer runs, a stock program that generates something else.

    All three on our server: the stock interpreter speaks to any SGLang server.
    """
    worker, size = load("lang_worker"), {"branches": 3, "decode": 4}
    runs = [worker.siblings(runtime, "The state is", **size)]
    runs.append(worker.independent(runtime, "The state is", **size))
    runs.append(worker.stock_siblings(server.url, "The state is", **size))
    assert [run["tokens"] for run in runs] == [12.0] * 3
    assert all(run["seconds"] > 0 for run in runs)


def test_killed_server(server: Server, runtime: rw.Runtime) -> None:
    """SIGKILL in the middle of a gen: ServerGone within a second. Runs last: the server is gone."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.sync()
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.monotonic())
            server.kill()

        s += gen("b", max_tokens=3000, ignore_eos=True, temperature=0)
        threading.Timer(0.3, kill).start()
        with pytest.raises(ServerGone):
            s["b"]
        assert time.monotonic() - killed[0] < 1
        with pytest.raises(ServerGone):
            s += "more"

    program.run(backend=runtime)


def test_killed_engine_process(engine: rw.Engine) -> None:
    """SGLang's answer to a dead scheduler is to kill the process that runs the program."""

    @function
    def program(s: State) -> None:
        s += "Q" + gen("a", max_tokens=2)
        s.sync()
        s += gen("b", max_tokens=3000, ignore_eos=True, temperature=0)
        time.sleep(0.3)
        for child in engine.transport._children:  # type: ignore[attr-defined]
            child.kill()
        killed = time.monotonic()
        with pytest.raises(ServerGone, match="engine is gone"):
            s["b"]
        assert time.monotonic() - killed < 1.5
        with pytest.raises(ServerGone):
            s += "more"

    program.run(backend=engine)
    with pytest.raises(ServerGone):
        program.run(backend=engine)
