"""Failures injected into a real engine: who is concerned is told, and nobody else notices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from sgl_rwttt.core.errors import StateError
from sgl_rwttt.core.faults import ENV_FAULTS
from tests.engine.served import LOGPROBS, Served, output_logprobs, rid, state
from tests.golden import golden_case

pytestmark = pytest.mark.engine
CASE = golden_case("llama_embed_proj")
CHUNK = int(CASE.config["ttt_chunk"])
VICTIM = "victim"
SAME = 1e-4  # absolute, log-probabilities of the same rows in a smaller batch


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """An engine that may be made to fail; prefill chunks shorter than the update chunk."""
    os.environ[ENV_FAULTS] = "1"
    engine = None
    try:
        engine = Served(CASE.path, max_total_tokens=480, ttt_memory_mb=1, chunked_prefill_size=3)
        yield engine
    finally:
        del os.environ[ENV_FAULTS]
        if engine is not None:
            engine.close()


def healthy(seed: int, length: int) -> list[int]:
    return [3 + (seed * 31 + i * 7) % 60 for i in range(length)]


WITNESSES = [(healthy(10 + i, 5 + 4 * i), 20 + i) for i in range(3)]
PROMPT = healthy(1, CHUNK + 3)
LONG = healthy(1, 40)


class Party:
    """Witnesses and a victim, always together; what they answer when nothing is armed."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.clean = self.run()

    def run(self, ids: list[int] = PROMPT, n: int = 2 * CHUNK + 2) -> list[Any]:
        """The answers, or the error's text; the victim's is the last."""
        self.served.flush()
        witnesses = [self.ask(w, count) for w, count in WITNESSES]
        return self.served.run(*witnesses, self.ask(ids, n, VICTIM, delay=0.05))

    async def ask(self, ids: list[int], n: int, name: str | None = None, delay: float = 0) -> Any:
        try:
            return await self.served.agenerate(ids, n=n, rid=name, delay=delay, **LOGPROBS)
        except Exception as error:
            return str(getattr(error, "detail", error))

    def armed(self, point: str, action: str, **options: Any) -> list[Any]:
        """The answers with a fault armed for the victim."""
        run = {key: options.pop(key) for key in ("ids", "n") if key in options}
        self.served.control("fault", point=point, action=action, branch=VICTIM, **options)
        try:
            return self.run(**run)
        finally:
            self.served.control("fault", disarm=True)

    def unaffected(self, answers: list[Any]) -> None:
        """Ids, states and log-probabilities of the given answers are those without the fault."""
        for got, want in zip(answers, self.clean, strict=False):
            assert got["output_ids"] == want["output_ids"]
            for field in ("state_id", "version", "tail", "position"):
                assert state(got)[field] == state(want)[field]
            assert (output_logprobs(got) - output_logprobs(want)).abs().max() < SAME


@pytest.fixture(scope="module")
def party(served: Served) -> Party:
    return Party(served)


@pytest.fixture
def counted(served: Served) -> Iterator[Any]:
    """Checks the ledger after the test; gives what the counters rose by."""
    before = served.info()["counters"]

    def since() -> dict[str, int]:
        info = served.info()
        assert info["integrity_checked"] and info["store"]["owners"] == 0
        rose = {k: v - before.get(k, 0) for k, v in info["counters"].items()}
        watched = ("failed_writes", "retried_writes", "aborted", "retracted", "refused")
        return {k: v for k, v in rose.items() if v and k in watched}

    yield since
    since()
    served.flush()
    assert served.info()["store"]["pages_live"] == 0


def test_prefill_chunks_shorter_than_the_update_chunk(served: Served) -> None:
    """Guards, kind 3: state missing where a prefill chunk ends inside an update chunk
    (sglang PR#30938)."""
    answer = served.generate(CASE.prompt_ids, n=len(CASE.generated_ids))
    assert answer["output_ids"] == CASE.generated_ids


def test_a_write_that_raises_once_is_retried_alone(party: Party, counted: Any) -> None:
    """Guards: a transient failure that ends a request or changes an answer."""
    answers = party.armed("write.batch", "raise")
    party.unaffected(answers)
    assert counted().keys() == {"retried_writes"}


@pytest.mark.parametrize(
    ("point", "action", "options", "named"),
    [
        ("write.batch", "raise", {"times": 0}, "WriteFailed"),
        ("write.candidate", "not_finite", {"times": 0}, "WriteFailed"),
        ("write.candidate", "not_finite", {"times": 0, "n": 0, "ids": LONG}, "WriteFailed"),
        ("publish.allocated", "raise", {"skip": 1}, "WriteFailed"),
        ("write.begin", "raise", {"error": "StateCapacity", "skip": 9}, "StateCapacity"),
        ("boundary_before_commit", "raise", {"error": "StaleVersion"}, "StaleVersion"),
        ("boundary_before_commit", "raise", {"error": "WriteFailed"}, "WriteFailed"),
        ("allocated", "raise", {}, "WriteFailed"),
        ("mid_tail", "raise", {}, "WriteFailed"),
    ],
)  # fmt: skip
def test_a_failure_is_typed_and_its_owner_s_alone(
    party: Party, counted: Any, point: str, action: str, options: dict[str, Any], named: str
) -> None:
    """Guards: one owner's failed, full, stale or half-published write that reaches the others."""
    answers = party.armed(point, action, **options)
    error = StateError.from_header(answers[-1])
    assert type(error).__name__ == named
    assert (error.owner, error.branch) == (VICTIM, VICTIM)
    party.unaffected(answers[:-1])
    assert counted()["failed_writes"] == 1


@pytest.mark.parametrize(
    ("point", "options"),
    [
        ("queued", {}),
        ("matched", {"ids": healthy(1, 400)}),  # does not fit beside the witnesses: it waits
        ("allocated", {}),
        ("mid_prefill", {}),
        ("mid_tail", {"skip": 3}),
        ("boundary_before_commit", {"skip": 1}),
        ("after_commit", {"skip": 1}),
    ],
)
def test_a_client_that_goes_away(
    party: Party, counted: Any, point: str, options: dict[str, Any]
) -> None:
    """Guards, kind 9: an abort at a named point that leaks or reaches others (sglang PR#12693)."""
    before = party.served.info()["counters"]["admissions"]
    answers = party.armed(point, "abort", **options)
    gone = answers[-1]
    assert isinstance(gone, str) or gone["meta_info"]["finish_reason"]["type"] == "abort"
    party.unaffected(answers[:-1])
    assert counted() == {"aborted": 1}
    admitted = party.served.info()["counters"]["admissions"] - before
    assert admitted == len(WITNESSES) + (point not in ("queued", "matched"))


def test_a_client_that_goes_away_when_all_is_done(party: Party, counted: Any) -> None:
    """Guards, kind 9: an abort of a finished request that ends another one."""
    party.unaffected(party.armed("finished", "abort"))
    assert counted() == {}


@pytest.mark.parametrize("skip", [2, CHUNK + 2])
def test_a_retraction_in_an_open_chunk(party: Party, counted: Any, skip: int) -> None:
    """Guards: a retracted owner that comes back without its open chunk, or with rows twice."""
    answers = party.armed("mid_tail", "retract", skip=skip)
    party.unaffected(answers)
    assert counted() == {"retracted": 1}


def test_rolling_back_past_what_is_retained(served: Served, counted: Any) -> None:
    """Guards: an earlier point answered from another state when its own was lost (vllm#39273)."""
    owner = served.open()
    parent = served.generate(healthy(7, 3 * CHUNK), n=4, owner=owner)
    ask = {"n": 10, "owner": owner, "parent": rid(parent), "offset": CHUNK + 3}
    kept = served.generate(healthy(8, 3), **ask)
    served.flush()
    lost = served.generate(healthy(8, 3), **ask)
    assert lost["meta_info"]["cached_tokens"] == 0
    assert lost["output_ids"] == kept["output_ids"]
    assert state(lost)["state_id"] == state(kept)["state_id"]
    served.control("close", owner=owner)
