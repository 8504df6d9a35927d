"""The first requests of a fork's branches: one batch, and nobody depends on the others."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_rwttt import (
    InvalidStateRequest,
    Runtime,
    ServerGone,
    StateCapacity,
    StateError,
    assistant,
    function,
    gen,
    select,
    user,
)
from sgl_rwttt.lang import StateBackend, siblings
from sgl_rwttt.lang.state import State
from sgl_rwttt.lang.steps import Step

from .conftest import check_text
from .fake_http import FakeHttp
from .fake_transport import FakeServer, FakeTransport, Json

pytestmark = pytest.mark.timeout(20)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for a sibling that does not come runs into the test's time limit."""
    monkeypatch.setattr(siblings, "WAIT_S", 60.0)


def batches(server: FakeServer) -> list[Json]:
    return [payload for op, payload in server.log if op == "batch"]


def sizes(server: FakeServer) -> list[int]:
    return [len(payload["rid"]) for payload in batches(server)]


def generates(server: FakeServer) -> list[Json]:
    return [payload for op, payload in server.log if op == "generate"]


def test_one_payload_for_all(server: FakeServer, backend: StateBackend) -> None:
    """Guards: n POSTs, of which the first is prefilled alone; parameters of another branch."""

    @function
    def program(s: State) -> None:
        s += "A state is "
        with s.fork(4) as branches:
            branches += [f"{i}:" + gen("a", max_tokens=2 + i, temperature=i / 10) for i in range(4)]
            for i, branch in enumerate(branches):
                assert len(branch.get_meta_info("a")["output_token_logprobs"]) == 2 + i
                check_text(branch)
            branches += gen("b", max_tokens=1)

    program.run(backend=backend)
    (batch,) = batches(server)
    sampling = batch["sampling_params"]
    assert [p["max_new_tokens"] for p in sampling] == [2, 3, 4, 5]
    assert [p["temperature"] for p in sampling] == [0.0, 0.1, 0.2, 0.3]
    assert len(set(batch["rid"])) == 4
    parent = generates(server)[0]
    assert batch["session_params"]["rid"] == parent["rid"]
    assert batch["session_params"]["offset"] == len(parent["input_ids"])
    assert batch["return_logprob"] == [True] * 4
    assert len(generates(server)) == 1 + 4 + 4


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("frozen", [False, True], ids=["write", "read"])
def test_equal_to_one_by_one(
    stream: bool, frozen: bool, server: FakeServer, backend: StateBackend
) -> None:
    """Guards: another branch's answer, or one that depends on how it was sent."""

    @function
    def program(s: State) -> None:
        if frozen:
            s.freeze()
        s += user("Q")
        with s.fork(3) as branches:
            branches += [
                assistant(f"{i}" + gen("a", max_tokens=3 + 2 * i, stop=["te", " "])) + "!"
                for i in range(3)
            ]
            branches += gen("b", max_tokens=4) + select("c", ["yes", "no"])
            outcomes.append([(b.text(), b.tokens, b.state_id, b.mode) for b in branches])

    outcomes: list[Any] = []
    for use_thread in (True, False):
        run = program.run(backend=backend, temperature=0, use_thread=use_thread, stream=stream)
        assert "".join(run.text_iter()) == run.text()
    assert outcomes[0] == outcomes[1]
    assert sizes(server) == [3]


def test_a_streamed_run_sees_each_branch_grow(server: FakeServer, backend: StateBackend) -> None:
    """Guards: branches of a streamed run that say nothing before their end."""
    pieces: list[list[str]] = []

    @function
    def program(s: State) -> None:
        s += "Q"
        branches = s.fork(2)
        branches += gen("a", max_tokens=6)
        pieces.extend(list(branch.text_iter("a")) for branch in branches)

    run = program.run(backend=backend, stream=True)
    assert "".join(run.text_iter()) == "Q"
    assert sizes(server) == [2]
    assert all("stream_interval" not in p for p in batches(server)[0]["sampling_params"])
    assert all(pieces)


def test_only_the_end_of_other_runs_is_streamed(server: FakeServer, backend: StateBackend) -> None:
    """Guards: an item per token on the wire that nobody reads."""
    items: list[Json] = []
    transport: Any = backend.transport
    whole = transport.generate_siblings

    def counted(payload: Json) -> Iterator[Json]:
        for item in whole(payload):
            items.append(item)
            yield item

    transport.generate_siblings = counted

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(2) as branches:
            branches += gen("a", max_tokens=9)

    program.run(backend=backend)
    assert len(items) <= 2 * 2, "the first token and the whole of each"


def test_a_fast_branch_does_not_wait_for_a_slow_one(
    server: FakeServer, backend: StateBackend
) -> None:
    """Guards: an answer that is handed over when the last of the batch has come."""
    transport: Any = backend.transport
    whole, may_end = transport.generate_siblings, threading.Event()

    def one_is_slow(payload: Json) -> Iterator[Json]:
        items = list(whole(payload))
        slow = [item for item in items if item["index"] == 0]
        yield from (item for item in items if item["index"] != 0)
        assert may_end.wait(10)
        yield from slow

    transport.generate_siblings = one_is_slow

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(3) as branches:
            branches += gen("a", max_tokens=2)
            assert branches[1]["a"] and branches[2]["a"]
            assert "a" not in branches[0].stream_executor.variables
            may_end.set()
            assert branches[0]["a"]

    program.run(backend=backend)


def test_a_refusal_fails_its_branch_alone(server: FakeServer, backend: StateBackend) -> None:
    """Guards: siblings that end with one's error."""

    @function
    def program(s: State) -> None:
        s += "Q"
        s.flush()
        server.failures.append(StateCapacity("no pages", owner=s.owner))
        with s.fork(3) as branches:
            branches += gen("a", max_tokens=3)
            errors = [branch.stream_executor.error() for branch in branches]
            assert sum(isinstance(error, StateCapacity) for error in errors) == 1
            assert sum(error is None for error in errors) == 2
            assert sum("a" in b for b in branches) == 2

    program.run(backend=backend)
    assert sizes(server) == [3]


def test_a_refused_batch_is_sent_one_by_one(server: FakeServer, backend: StateBackend) -> None:
    """Guards: branches that fail because SGLang refuses a batch for one bad request in it."""
    server.batch_failures.append(InvalidStateRequest("one of them is too long"))

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(3) as branches:
            branches += gen("a", max_tokens=3)
            assert all(len(b["a"]) for b in branches)

    program.run(backend=backend)
    assert sizes(server) == [3]
    assert len(generates(server)) == 1 + 3


@pytest.mark.parametrize(
    "items, error",
    [(0, ServerGone("gone")), (2, ServerGone("gone")), (2, StateError("cut off"))],
    ids=["lost at once", "lost later", "cut off"],
)
def test_a_broken_batch_ends_every_branch(
    items: int, error: StateError, server: FakeServer, backend: StateBackend
) -> None:
    """Guards: a branch that waits for ever, or that asks again what may have run already."""
    server.breaks.append((items, error))

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(3) as branches:
            branches += gen("a", max_tokens=4)
            errors = [branch.stream_executor.error() for branch in branches]
            assert {type(e) for e in errors} == {type(error)}
            assert len({id(e) for e in errors}) == 3

    program.run(backend=backend)


def test_a_batch_that_ends_too_soon(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a branch that waits for an item that never comes."""
    transport: Any = backend.transport
    transport.generate_siblings = lambda payload: iter(())

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(2) as branches:
            branches += gen("a", max_tokens=4)
            assert all("ended before" in str(b.stream_executor.error()) for b in branches)

    program.run(backend=backend)


def test_a_transport_with_a_bug(server: FakeServer, backend: StateBackend) -> None:
    """Guards: an error that ends the reader's thread and leaves the branches waiting."""
    transport: Any = backend.transport
    transport.generate_siblings = lambda payload: iter([{"index": 99}])

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(2) as branches:
            branches += gen("a", max_tokens=4)
            assert all(isinstance(b.stream_executor.error(), IndexError) for b in branches)

    program.run(backend=backend)


def test_an_unused_branch_costs_the_bound_once(
    server: FakeServer, backend: StateBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: a program that forks 4, uses 2, and hangs or waits at every request."""
    monkeypatch.setattr(siblings, "WAIT_S", 0.3)
    took: list[float] = []

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(4) as branches:
            for i in (1, 3):
                branches[i] += gen("a", max_tokens=2)
            assert branches[1]["a"] and branches[3]["a"]
            start = time.monotonic()
            branches[0] += gen("a", max_tokens=2)
            branches[1] += gen("b", max_tokens=2)
            assert branches[0]["a"] and branches[1]["b"]
            took.append(time.monotonic() - start)

    program.run(backend=backend)
    assert sizes(server) == [2]
    assert took[0] < 0.3, "the gate stays closed"


def test_nobody_waits_for_who_cannot_come(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a wait for branches that were freed, failed, went back, or were asked for nothing."""

    @function
    def freed(s: State) -> None:
        s += "Q"
        with s.fork(4) as branches:
            branches.prune(lambda b: id(b), keep=3)
            branches += gen("a", max_tokens=2)

    @function
    def failed(s: State) -> None:
        s += "Q"
        with s.fork(3) as branches:
            branches[1] += gen("a", max_tokens=2, dtype="colour")
            for i in (0, 2):
                branches[i] += gen("a", max_tokens=2)
            assert isinstance(branches[1].stream_executor.error(), InvalidStateRequest)

    @function
    def back(s: State) -> None:
        s += "Q"
        s.checkpoint()
        s += "R"
        with s.fork(3) as branches:
            branches[2].rollback()
            for branch in branches:
                branch += gen("a", max_tokens=2)
                check_text(branch) if branch is branches[2] else None

    @function
    def unasked(s: State) -> None:
        s += "Q"
        with s.fork(3) as branches:
            branches += "one "
            branches += [gen("a", max_tokens=2), "only text", "x" + gen("a", max_tokens=2)]
            branches[0].sync()

    for program, size in ((freed, 3), (failed, 2), (back, 2), (unasked, 2)):
        server.log.clear()
        program.run(backend=backend)
        assert sizes(server) == [size], program.func.__name__


def test_the_last_one_goes_alone_at_once(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a thread and a batch for a request that has nobody to wait for."""

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(1) as one, s.fork(2) as two:
            one += gen("a", max_tokens=2)
            two.prune(lambda b: id(b))
            two += gen("a", max_tokens=2)

    program.run(backend=backend)
    assert sizes(server) == []


def test_fork_of_an_empty_context(server: FakeServer, backend: StateBackend) -> None:
    """Guards: root requests, which have no parent to share, sent one by one."""

    @function
    def program(s: State) -> None:
        with s.fork(3) as branches:
            branches += [text + gen("a", max_tokens=2) for text in ("Yes", "No", "Maybe")]
            texts = [b.text() for b in branches]
        assert [t[:2] for t in texts] == ["Ye", "No", "Ma"]

    program.run(backend=backend)
    assert [p["session_params"].keys() for p in batches(server)] == [{"id"}]


def test_commit_nodes_go_together_too(server: FakeServer, backend: StateBackend) -> None:
    """Guards: what a flush, freeze or select of each branch consumes, sent one by one."""

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(3) as branches:
            branches += ["a", "b", "c"]
            for branch in branches:
                branch.stream_executor.submit(Step(branch.stream_executor.settle))
            ids = {branch.state_id for branch in branches}
            assert len(ids) == 3

    program.run(backend=backend)
    assert sizes(server) == [3]
    assert [p["max_new_tokens"] for p in batches(server)[0]["sampling_params"]] == [0, 0, 0]


def test_another_place_is_not_the_same_batch(server: FakeServer, backend: StateBackend) -> None:
    """Guards: a request that goes out under the session parameters of another parent."""

    @function
    def program(s: State) -> None:
        s += "Q"
        s.snapshot("here")
        with s.fork(2) as branches:
            branches[0].restore("here")
            branches += ["A" + gen("a", max_tokens=2), "B" + gen("a", max_tokens=2)]
            for branch in branches:
                check_text(branch)
            assert (branches[0].text()[0], branches[1].text()[:2]) == ("A", "QB")

    program.run(backend=backend)


def test_a_run_that_is_cut_off(server: FakeServer, backend: StateBackend) -> None:
    """Guards: branches that keep a failed run from ending."""

    @function
    def program(s: State) -> None:
        s += "Q"
        branches = s.fork(3)
        branches[0] += gen("a", max_tokens=2)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        program.run(backend=backend)


def test_over_http(server: FakeServer, tmp_path: Path) -> None:
    """Guards: items, refusals or errors of a batch that the wire changes."""

    @function
    def program(s: State, refused: int) -> None:
        s += "Q"
        s.flush()
        server.failures += [StateCapacity("no pages", owner=s.owner)] * refused
        with s.fork(3) as branches:
            branches += gen("a", max_tokens=3)
            errors = [branch.stream_executor.error() for branch in branches]
            assert sum(isinstance(error, StateCapacity) for error in errors) == refused
            assert sum(error is None for error in errors) == 3 - refused

    server.tokenizer.save_pretrained(tmp_path)
    with FakeHttp(server) as http:
        runtime = Runtime(http.url, tokenizer_path=str(tmp_path))
        program.run(backend=runtime, refused=0)
        program.run(backend=runtime, refused=1)
        server.batch_failures.append(InvalidStateRequest("one of them"))
        program.run(backend=runtime, refused=0)
        runtime.shutdown()
    assert sizes(server) == [3, 3, 3]


def test_a_request_that_the_program_waits_for_goes_at_once(
    server: FakeServer, backend: StateBackend
) -> None:
    """Guards: a fork, checkpoint or score in a branch that waits for siblings who stay silent."""

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(3) as branches:
            branches += [" one", " two", " three"]
            with branches[0].fork(2) as inner:
                inner += gen("a", max_tokens=2)
            branches[1].checkpoint()
            assert branches[2].score(" four").tokens

    program.run(backend=backend)
    assert sizes(server) == [2]


def test_one_batch_has_one_parent(server: FakeServer) -> None:
    """Guards: a request that goes out under the session parameters of another place."""
    gate, transport = siblings.Siblings(), FakeTransport(server)
    seats = [gate.seat() for _ in range(3)]
    parents = [{"id": "a", "rid": "1", "offset": offset} for offset in (4, 3, 4)]
    joined = [
        seat.join(transport, {"session_params": parent, "rid": str(i)})
        for i, (seat, parent) in enumerate(zip(seats, parents, strict=True))
    ]
    assert [items is None for items in joined] == [False, True, False]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_server_that_streams_increments(
    stream: bool, server: FakeServer, backend: StateBackend
) -> None:
    """Guards: tokens or logprobs of an answer lost with --incremental-streaming-output."""
    transport: Any = backend.transport
    whole = transport.generate_siblings

    def increments(payload: Json) -> Iterator[Json]:
        sent, items = [0] * len(payload["rid"]), list(whole(payload))
        logprobs = {i["index"]: i["meta_info"].get("output_token_logprobs") for i in items}
        for item in items:
            index, end = item["index"], len(item["output_ids"])
            new, sent[index] = slice(sent[index], end), end
            meta = {**item["meta_info"], "output_token_logprobs": logprobs[index][new]}
            yield {**item, "output_ids": item["output_ids"][new], "meta_info": meta}

    @function
    def program(s: State) -> None:
        s += "Q"
        with s.fork(2) as branches:
            branches += ["A" + gen("a", max_tokens=7), "B" + gen("a", max_tokens=5)]
            metas = [b.get_meta_info("a") for b in branches]
            ids = [[item[1] for item in meta["output_token_logprobs"]] for meta in metas]
            outcomes.append(
                [(b.text(), b.tokens, said) for b, said in zip(branches, ids, strict=True)]
            )

    outcomes: list[Any] = []
    for way in (whole, increments):
        transport.generate_siblings = way
        run = program.run(backend=backend, temperature=0, stream=stream)
        assert "".join(run.text_iter()) == "Q"
    assert outcomes[0] == outcomes[1]
    assert [len(said) for _, _, said in outcomes[0]] == [7, 5]
