"""Modes, wait budget and commits change which forward passes run, and nothing else."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.served import Served, rid, state
from tests.golden import golden_case

pytestmark = pytest.mark.engine
CASE = golden_case("llama_embed_proj")
CHUNK = int(CASE.config["ttt_chunk"])
SMALL = {"max_total_tokens": 500, "ttt_memory_mb": 1, "chunked_prefill_size": 24}

ENGINES: dict[str, dict[str, Any]] = {
    "phase": {"ttt_mode": "phase", "ttt_wait_budget": 2},
    "serial": {"ttt_mode": "serial"},
    # Retraction every few steps on top: held rows are retracted too.
    "held": {"ttt_wait_budget": 3, "ttt_target_batch": 2, "ttt_commit": "dense"},
}


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 128) for _ in range(length)]


def cases() -> list[dict[str, Any]]:
    """Seven owners out of phase, one that only reads, two that own no state."""
    found: list[dict[str, Any]] = [
        {"ids": prompt(i, 5 + 7 * i), "n": 22 + 3 * i, "delay": 0.01 * (i % 3)} for i in range(7)
    ]
    found.append({"ids": prompt(40, 3 * CHUNK), "n": 25, "custom": {"ttt_mode": "read"}})
    found += [{"ids": prompt(i, 30), "n": 25, "custom": {"ttt_mode": "off"}} for i in (50, 51)]
    return found


def outcome(answer: dict[str, Any]) -> tuple[Any, ...]:
    """Output ids, and version, tail and state id where there is a state."""
    report = answer["meta_info"].get("state")
    fields = ("version", "tail", "position", "state_id")
    return answer["output_ids"], report and [report[field] for field in fields]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Every case alone, cold, in an engine of the default mode; and a session's two turns."""
    engine = Served(CASE.path, **SMALL)
    try:
        alone = []
        for case in cases():
            engine.flush()
            alone.append(outcome(engine.generate(**case)))
        engine.flush()
        assert engine.info()["planner"]["held"] == 0
        return {"alone": alone, "session": session(engine)}
    finally:
        engine.close()


@pytest.fixture(scope="module", params=list(ENGINES))
def served(request: pytest.FixtureRequest, expected: dict[str, Any]) -> Iterator[Served]:
    """Started after ``expected`` closed its engine: closing one kills every child process."""
    retract = request.param == "held"
    if retract:
        os.environ["SGLANG_TEST_RETRACT"] = "true"
        os.environ["SGLANG_TEST_RETRACT_INTERVAL"] = "7"
    try:
        engine = Served(CASE.path, **SMALL, **ENGINES[request.param])
    finally:
        if retract:
            del os.environ["SGLANG_TEST_RETRACT"], os.environ["SGLANG_TEST_RETRACT_INTERVAL"]
    yield engine
    engine.close()


def session(served: Served) -> list[tuple[Any, ...]]:
    """A parent, and four children of it together."""
    owner = served.open()
    parent = served.generate(prompt(60, 2 * CHUNK + 3), n=6, owner=owner)
    children = served.run(
        *(
            served.agenerate(prompt(61 + i, 2 + i), n=20, owner=owner, parent=rid(parent))
            for i in range(4)
        )
    )
    served.control("close", owner=owner)
    return [outcome(answer) for answer in (parent, *children)]


def balanced(served: Served) -> None:
    info = served.info()
    assert info["integrity_checked"], "a request still runs"
    assert info["store"]["owners"] == 0


def test_a_batch_equals_its_members_alone(served: Served, expected: dict[str, Any]) -> None:
    """Guards: a mode, a wait, a retraction of a held row or a dense commit that changes tokens or
    states; KV of a stateless request met by an owner's."""
    for _ in range(2):  # cold, then over whatever the caches kept
        answers = served.run(*(served.agenerate(**case) for case in cases()))
        for case, answer, alone in zip(cases(), answers, expected["alone"], strict=True):
            assert outcome(answer) == alone, case
        balanced(served)
    planner = served.info()["planner"]
    if planner["mode"] == "rw":
        assert 0 < planner["max_wait"] <= planner["wait_budget"]
        assert planner["held"] > 0
        assert served.info()["store"]["folds"] > 0, "no commit was dense"
    else:
        assert planner["forwards"] > planner["rounds"], "no round was divided"
    served.flush()


def test_forks_equal(served: Served, expected: dict[str, Any]) -> None:
    """Guards: siblings that share pages and wait for each other."""
    assert session(served) == expected["session"]
    served.flush()


async def abandoned(served: Served, ids: list[int], wait: float) -> None:
    name = f"gone-{wait}-{len(ids)}"
    task = asyncio.ensure_future(served.agenerate(ids, n=200, rid=name))
    await asyncio.sleep(wait)
    served.engine.tokenizer_manager.abort_request(rid=name)
    await asyncio.gather(task, return_exceptions=True)


def test_clients_go_while_others_wait(served: Served, expected: dict[str, Any]) -> None:
    """Guards: an aborted request that a group waits for, or whose row the next one inherits."""
    gone = [abandoned(served, prompt(80 + i, 9 + 5 * i), 0.02 * i) for i in range(8)]
    answers = served.run(*(served.agenerate(**case) for case in cases()[:4]), *gone)
    assert [outcome(answer) for answer in answers[:4]] == expected["alone"][:4]
    balanced(served)
    served.flush()


def test_penalties(served: Served) -> None:
    """Guards: penalties counted for a row that did not run, or a batch divided under them."""
    ask = {"ids": prompt(90, 12), "n": 20, "sampling": {"frequency_penalty": 0.5}}
    if served.info()["planner"]["mode"] != "rw":
        with pytest.raises(ValueError, match=r"frequency_penalty cannot .*--ttt-mode"):
            served.generate(**ask)
        return
    alone = outcome(served.generate(**ask))
    served.flush()
    answers = served.run(*(served.agenerate(**c) for c in (ask, *cases()[:3])))
    assert outcome(answers[0])[0] == alone[0]
    served.flush()


def test_a_stateless_request_is_the_base_model(served: Served) -> None:
    """Guards: ``off`` that reads a state, joins a lineage, or is taken silently in a session."""
    answer = served.generate(prompt(50, 30), n=4, custom={"ttt_mode": "off"})
    assert "state" not in answer["meta_info"]
    again = served.generate(prompt(50, 30), n=4, custom={"ttt_mode": "off"})
    assert again["meta_info"]["cached_tokens"] == 29
    assert served.generate(prompt(50, 30), n=4)["meta_info"]["cached_tokens"] == 0
    owner = served.open()
    for extra in ({"owner": owner}, {"custom": {"ttt_mode": "off", "ttt_expect": "00" * 16}}):
        ask = {"custom": {"ttt_mode": "off"}, **extra}
        with pytest.raises(ValueError, match="owns no state: it cannot have"):
            served.generate(prompt(50, 30), n=4, **ask)
    served.control("close", owner=owner)
    assert state(served.generate(prompt(50, 30), n=1))["version"] > 0
    served.flush()
