"""KV and state are reused together or not at all, under every kind of pressure."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.served import Served, rid, state
from tests.golden import golden_case

pytestmark = pytest.mark.engine
CASE = golden_case("llama_embed_proj")
CHUNK = int(CASE.config["ttt_chunk"])
VOCAB = 128


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def balanced(served: Served) -> dict[str, Any]:
    """The ledger after a test: nobody runs, the books balance."""
    info = served.info()
    assert info["integrity_checked"], "a request still runs"
    assert info["store"]["owners"] == 0
    return info


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Small KV and page pools: 700 tokens, 128 pages of 8 tokens."""
    engine = Served(CASE.path, max_total_tokens=700, ttt_memory_mb=1, chunked_prefill_size=24)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def cold(served: Served) -> Iterator[None]:
    served.flush()
    yield
    balanced(served)


def test_repeat_hits_up_to_the_last_token(served: Served) -> None:
    """Guards: a hit of one cache but not the other, or no hit at all because of the tail."""
    for length in (1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 5):
        served.flush()
        tokens = prompt(length, length)
        first = served.generate(tokens, n=6)
        again = served.generate(tokens, n=6)
        assert first["meta_info"]["cached_tokens"] == 0
        assert again["output_ids"] == first["output_ids"], f"length {length}"
        boundary = (length - 1) // CHUNK * CHUNK
        assert again["meta_info"]["cached_tokens"] >= boundary
        assert state(again)["state_id"] == state(first)["state_id"]


def test_shared_prefix_hits_and_equals_a_cold_run(served: Served) -> None:
    """Guards: a sibling that reuses KV beyond the point where its state is retained."""
    shared = prompt(1, 3 * CHUNK + 3)
    tails = [prompt(100 + i, i + 1) for i in range(2 * CHUNK)]
    colds = []
    for tail in tails:
        served.flush()
        colds.append(served.generate(shared + tail, n=4)["output_ids"])
    served.flush()
    served.generate(shared, n=0)
    for tail, cold_ids in zip(tails, colds, strict=True):
        warm = served.generate(shared + tail, n=4)
        assert warm["output_ids"] == cold_ids
        assert warm["meta_info"]["cached_tokens"] >= 3 * CHUNK


def test_kv_without_state_is_not_a_hit(served: Served) -> None:
    """Guards: the state record dropped while the KV stays; the hit must end where both exist.

    Filling the page pool with other prompts evicts the first one's memos before its KV.
    """
    tokens = prompt(5, 4 * CHUNK + 2)
    expected = served.generate(tokens, n=8)["output_ids"]
    for seed in range(40):
        served.generate(prompt(1000 + seed, 40), n=0)
        if seed % 8 == 0:
            assert served.generate(tokens, n=8)["output_ids"] == expected
    assert served.info()["store"]["evictions"] > 0
    assert served.generate(tokens, n=8)["output_ids"] == expected


def test_owners_with_different_roots_never_share(served: Served) -> None:
    """Guards: prefix KV computed under one state reused for another (or for a re-made one)."""
    question = prompt(9, 2 * CHUNK + 3)

    def ask(owner: str | None, root: str | None) -> Any:
        custom = None if root is None else {"ttt_root": root}
        return served.generate(question, n=6, owner=owner, custom=custom)

    def adapted(owner: str, seed: int) -> str:
        answer = served.generate(
            prompt(seed, 2 * CHUNK), n=0, owner=owner, custom={"ttt_clear": "drop"}
        )
        return str(state(answer)["next_root"])

    def lineup() -> list[tuple[list[int], str]]:
        a, b = served.open(), served.open()
        cells = [(a, None), (a, adapted(a, 31)), (b, adapted(b, 32)), (b, None)]
        answers = [ask(owner, root) for owner, root in cells]
        for owner in (a, b):
            served.control("close", owner=owner)
        return [(r["output_ids"], state(r)["state_id"]) for r in answers]

    first = lineup()
    assert lineup() == first
    base, first_root, second_root, base_again = first
    assert base == base_again
    assert len({base[1], first_root[1], second_root[1]}) == 3
    assert base[0] != first_root[0] or base[0] != second_root[0]


def test_a_frozen_token_does_not_meet_a_written_one(served: Served) -> None:
    """Guards: KV of a token read in READ mode reused for the same token in WRITE mode."""
    head, rest = prompt(3, CHUNK), prompt(4, 3 * CHUNK)
    owner = served.open()
    parent = rid(served.generate(head, n=0, owner=owner))
    results = {}
    for mode in ("write", "read", "write", "read"):
        answer = served.generate(rest, n=6, owner=owner, parent=parent, custom={"ttt_mode": mode})
        kept = (answer["output_ids"], state(answer)["state_id"])
        assert results.setdefault(mode, kept) == kept
        assert state(answer)["version"] == (1 if mode == "read" else 1 + (3 * CHUNK + 5) // CHUNK)
    assert results["write"][1] != results["read"][1]
    served.control("close", owner=owner)


def test_pressure_from_many_prompts(served: Served) -> None:
    """Guards: eviction of KV and pages in any order changing an answer or losing a slot."""
    rng = random.Random(11)
    prompts = [prompt(s, rng.randrange(5, 60)) for s in range(12)]
    expected = {}
    for i, tokens in enumerate(prompts):
        served.flush()
        expected[i] = served.generate(tokens, n=20)["output_ids"]
    for _round in range(3):
        order = [rng.randrange(12) for _ in range(16)]
        answers = served.run(
            *(served.agenerate(prompts[i], n=20, delay=rng.uniform(0, 0.3)) for i in order)
        )
        for i, answer in zip(order, answers, strict=True):
            assert answer["output_ids"] == expected[i], f"prompt {i}"
        balanced(served)


def test_pages_run_out_while_decoding(served: Served) -> None:
    """Guards: a full page pool in mid-decode; owners are retracted and come back equal."""
    prompts = [prompt(50 + i, 17) for i in range(14)]
    expected = []
    for tokens in prompts:
        served.flush()
        expected.append(served.generate(tokens, n=30)["output_ids"])
    served.flush()
    answers = served.run(*(served.agenerate(tokens, n=30) for tokens in prompts))
    assert [a["output_ids"] for a in answers] == expected


def test_pinned_pages_are_a_limit(served: Served) -> None:
    """Guards: a request that can never get its pages waiting for ever; unpinning lets it run."""
    owner = served.open()
    for i in range(9):
        tokens = prompt(200 + i, 13 * CHUNK)
        served.generate(tokens, n=0, owner=owner, custom={"ttt_pin": f"p{i}"})
    assert served.info()["store"]["pins"] == 9
    wanted = prompt(300, 24)
    with pytest.raises(Exception, match="StateCapacity"):
        for i in range(40):  # first the dense bases run out, then the pages
            served.generate(
                prompt(400 + i, 10 * CHUNK), n=0, owner=owner, custom={"ttt_pin": f"q{i}"}
            )
    for i in range(9):
        served.control("unpin", owner=owner, name=f"p{i}")
    assert len(served.generate(wanted, n=4)["output_ids"]) == 4
    served.control("close", owner=owner)


async def abandoned(served: Served, tokens: list[int], wait: float, n: int = 200) -> None:
    """A client that goes away after ``wait`` seconds."""
    task = asyncio.ensure_future(served.agenerate(tokens, n=n, rid=f"gone-{wait}-{tokens[0]}"))
    await asyncio.sleep(wait)
    served.engine.tokenizer_manager.abort_request(rid=f"gone-{wait}-{tokens[0]}")
    await asyncio.gather(task, return_exceptions=True)


def test_abort_anywhere(served: Served) -> None:
    """Guards: an abort (queued, mid-prefill, mid-tail, at a boundary) that leaks a page."""
    witness = prompt(70, 30)
    served.flush()
    expected = served.generate(witness, n=40)["output_ids"]
    waits = [0.0, 0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.12, 0.2, 0.3]
    gone = [abandoned(served, prompt(80 + i, 20 + 9 * i), w) for i, w in enumerate(waits)]
    answers = served.run(served.agenerate(witness, n=40), *gone)
    assert answers[0]["output_ids"] == expected
    balanced(served)
    before = served.info()["store"]["pages_live"]
    for _ in range(3):
        served.run(*(abandoned(served, prompt(80 + i, 40), 0.03) for i in range(4)))
    assert balanced(served)["store"]["pages_live"] <= before + 4 * 7


def test_flush_forgets_state_and_kv(served: Served) -> None:
    """Guards: a flush that drops one cache and keeps the other."""
    tokens = prompt(60, 3 * CHUNK + 1)
    first = served.generate(tokens, n=5)
    served.flush()
    assert served.info()["store"]["pages_live"] == 0
    again = served.generate(tokens, n=5)
    assert again["meta_info"]["cached_tokens"] == 0
    assert again["output_ids"] == first["output_ids"]


def test_flush_keeps_what_a_session_holds(served: Served) -> None:
    """Guards: a flush that takes a cleared root away from its owner."""
    owner = served.open()
    answer = served.generate(prompt(61, 2 * CHUNK), n=0, owner=owner, custom={"ttt_clear": "drop"})
    root = state(answer)["next_root"]
    ask = {"owner": owner, "custom": {"ttt_root": root}}
    before = served.generate(prompt(62, 10), n=5, **ask)
    served.flush()
    after = served.generate(prompt(62, 10), n=5, **ask)
    assert after["output_ids"] == before["output_ids"]
    assert state(after)["version"] == state(before)["version"]
    served.control("close", owner=owner)
