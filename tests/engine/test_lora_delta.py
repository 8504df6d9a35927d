"""``--ttt-backend lora_delta`` on a stock checkpoint: one engine, against PEFT token by token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_rwttt.backends.lora_config import DecoderShape, LoraDeltaConfig
from sgl_rwttt.backends.lora_slots import initial_adapter
from sgl_rwttt.core.errors import InvalidStateRequest
from tests.backends.lora_oracle import Owner, tiny_model
from tests.engine.served import Served, rid, state

pytestmark = pytest.mark.engine
CHUNK, LR, STEPS, VOCAB = 8, 0.01, 2, 128
RANK, SMALL = 8, 3
TAU = 4.6


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("qwen3", vocab_size=VOCAB, max_position_embeddings=512)


@pytest.fixture(scope="module")
def served(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("stock")
    model.save_pretrained(folder / "model")
    engine = Served(
        folder / "model",
        ttt_backend="lora_delta",
        ttt_rank=f"{RANK},{SMALL}",
        ttt_chunk=CHUNK,
        ttt_lr=LR,
        ttt_steps=STEPS,
        ttt_tau=TAU,
        ttt_train_tokens=2 * CHUNK,
        ttt_snapshot_dir=str(folder),
        chunked_prefill_size=20,
    )
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def cold(served: Served) -> Iterator[None]:
    served.flush()
    yield
    info = served.info()
    assert info["integrity_checked"] and info["store"]["owners"] == 0


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def alone(
    model: Any, fingerprint: str, tokens: list[int], n: int, rank: int = RANK
) -> tuple[list[int], int]:
    """(greedy ids, boundaries that were learnt) of one owner with PEFT, one token at a time."""
    config = LoraDeltaConfig(DecoderShape.from_hf(model.config), rank=rank)
    start = initial_adapter(config, fingerprint)
    owner = Owner(model, config.targets, config.rank, config.alpha, start)
    context, out, cache, updates = list(tokens), [], None, 0
    for at in range(len(tokens) + n - 1):
        logits, cache = owner.feed(context[at], cache)
        if at + 1 >= len(tokens):
            out.append(int(logits.argmax()))
            context.append(out[-1])
        if (at + 1) % CHUNK == 0:
            segment = context[at + 1 - CHUNK : at + 1]
            updates += owner.boundary(segment, LR, TAU, 0.1, STEPS)[1] > 0
    return out, updates


def test_batched_owners_equal_peft_alone(served: Served, model: Any) -> None:
    """Guards the whole path: prefill in pieces over boundaries, decode over boundaries, owners at
    different phases in one batch; each gets what PEFT and AdamW give it alone.
    """
    fingerprint = served.info()["fingerprint"]
    prompts = [prompt(i, length) for i, length in enumerate((5, 8, 27, 44))]
    before = served.info()["counters"]["updates"]
    answers = served.run(*(served.agenerate(tokens, n=30) for tokens in prompts))
    total = 0
    for tokens, answer in zip(prompts, answers, strict=True):
        ids, updates = alone(model, fingerprint, tokens, 30)
        assert answer["output_ids"] == ids
        report = state(answer)
        assert report["version"] == (len(tokens) + 29) // CHUNK
        assert report["updates"] == updates
        total += updates
    boundaries = sum(state(answer)["version"] for answer in answers)
    assert 0 < total < boundaries, "both kinds of boundaries must occur"
    assert served.info()["counters"]["updates"] - before == total
    served.flush()
    for tokens, answer in zip(prompts, answers, strict=True):
        again = served.generate(tokens, n=30)
        assert again["output_ids"] == answer["output_ids"]
        assert state(again)["state_id"] == state(answer)["state_id"]


def test_owners_of_two_ranks_in_one_batch(served: Served, model: Any) -> None:
    """Guards mixed service: owners of two ranks, and requests without state, run together, cross
    boundaries in the same steps, and each gets what it gets alone.
    """
    asked = [None, SMALL, RANK, SMALL]
    opened = [served.control("open", **({} if r is None else {"rank": r})) for r in asked]
    assert len({answer["root"] for answer in opened}) == 2
    assert opened[0]["root"] == opened[2]["root"] == served.info()["root"]
    prompts = [prompt(20 + i, 3 * CHUNK + 2) for i in range(4)]
    off, free = prompt(30, 12), {"ttt_mode": "off"}
    runs = zip(prompts, opened, strict=True)
    *answers, stateless = served.run(
        *(served.agenerate(tokens, n=30, owner=each["owner"]) for tokens, each in runs),
        served.agenerate(off, n=30, custom=free),
    )
    updates = 0
    for tokens, each, rank, answer in zip(prompts, opened, asked, answers, strict=True):
        ids, learnt = alone(model, each["fingerprint"], tokens, 30, rank or RANK)
        assert answer["output_ids"] == ids, rank
        report = state(answer)
        assert (report["updates"], report["root"]) == (learnt, each["root"])
        updates += learnt if rank == SMALL else 0
    assert updates > 0, "the smaller rank must learn"
    served.flush()
    assert served.generate(off, n=30, custom=free)["output_ids"] == stateless["output_ids"]
    for tokens, rank, answer in zip(prompts, asked, answers, strict=True):
        owner = served.control("open", **({} if rank is None else {"rank": rank}))["owner"]
        solo = served.generate(tokens, n=30, owner=owner)
        assert solo["output_ids"] == answer["output_ids"]
        assert state(solo)["state_id"] == state(answer)["state_id"]
        served.control("close", owner=owner)
    for each in opened:
        served.control("close", owner=each["owner"])
    with pytest.raises(InvalidStateRequest, match=r"serves no rank 5: it has \[8, 3\]"):
        served.control("open", rank=5)


def test_a_small_rank_is_saved_and_restored(served: Served) -> None:
    """Guards the file of the second rank: its header, its shapes, and an owner of the other rank
    that goes on with it.
    """
    owner = served.control("open", rank=SMALL)["owner"]
    first = served.generate(prompt(6, 4 * CHUNK + 1), n=8, owner=owner)
    clear = {"ttt_clear": "drop"}
    root = state(served.generate([7], n=0, owner=owner, parent=rid(first), custom=clear))
    served.control("save", owner=owner, name="small", root=root["next_root"], replace=True)
    question = prompt(8, 5)
    asked = {"ttt_root": root["next_root"]}
    expected = served.generate(question, n=20, owner=owner, custom=asked)
    served.control("close", owner=owner)
    served.flush()
    other = served.open()
    restored = served.control("restore", owner=other, name="small")
    again = served.generate(question, n=20, owner=other, custom={"ttt_root": restored["root"]})
    assert again["output_ids"] == expected["output_ids"]
    assert state(again)["state_id"] == state(expected)["state_id"]
    served.control("close", owner=other)
    served.flush()
    assert served.info()["store"]["pages_live"] == 0


def test_learning_changes_the_answer(served: Served, model: Any) -> None:
    """Guards against a state that nobody reads: frozen, and without state, it answers otherwise."""
    tokens = prompt(2, 40)
    learnt = served.generate(tokens, n=24)["output_ids"]
    off = served.generate(tokens, n=24, custom={"ttt_mode": "off"})["output_ids"]
    frozen = served.generate(tokens, n=24, custom={"ttt_mode": "read"})
    with torch.no_grad():
        base = model.generate(
            torch.tensor([tokens]), max_new_tokens=24, do_sample=False, eos_token_id=None
        )[0, len(tokens) :].tolist()
    assert off == frozen["output_ids"] == base != learnt
    assert (state(frozen)["version"], state(frozen)["updates"]) == (0, 0)


def test_prefix_hit_to_the_last_token(served: Served) -> None:
    """Guards the hit: evidence is token ids, so no tail has to be retained for it."""
    tokens = prompt(3, 3 * CHUNK + 5)
    first = served.generate(tokens, n=6)
    again = served.generate(tokens, n=6)
    assert again["meta_info"]["cached_tokens"] == len(tokens) - 1
    assert again["output_ids"] == first["output_ids"]
    assert state(again)["state_id"] == state(first)["state_id"]


def test_fork_rollback_and_frozen(served: Served) -> None:
    """Guards lineages: every continuation equals a cold run of the same tokens."""
    tokens, more = prompt(4, 2 * CHUNK + 3), prompt(5, CHUNK + 2)
    owner = served.open()
    first = served.generate(tokens, n=12, owner=owner)
    whole = tokens + first["output_ids"]
    at = {"owner": owner, "parent": rid(first)}
    points = {"fork": len(whole), "sibling": len(whole), "rollback": CHUNK + 2}
    for name, offset in points.items():
        answer = served.generate(more, n=14, offset=offset, **at)
        served.flush()
        expected = served.generate(whole[:offset] + more, n=14)
        assert answer["output_ids"] == expected["output_ids"], name
        assert state(answer)["version"] == state(expected)["version"]
    frozen = served.generate(more, n=14, custom={"ttt_mode": "read"}, **at)
    assert state(frozen)["version"] == len(whole) // CHUNK
    served.control("close", owner=owner)


def test_snapshot(served: Served) -> None:
    """Guards save and restore: the adapter goes on in a new owner as if nothing had happened."""
    owner = served.open()
    first = served.generate(prompt(6, 4 * CHUNK + 1), n=8, owner=owner)
    cleared = served.generate(
        [7], n=0, owner=owner, parent=rid(first), custom={"ttt_clear": "drop"}
    )
    root = state(cleared)["next_root"]
    served.control("save", owner=owner, name="adapter", root=root)
    question = prompt(8, 5)
    expected = served.generate(question, n=20, owner=owner, custom={"ttt_root": root})
    served.control("close", owner=owner)
    served.flush()
    assert served.info()["store"]["pages_live"] == 0
    other = served.open()
    restored = served.control("restore", owner=other, name="adapter")
    assert served.info()["store"]["pages_live"] == 1
    again = served.generate(question, n=20, owner=other, custom={"ttt_root": restored["root"]})
    assert again["output_ids"] == expected["output_ids"]
    assert state(again)["state_id"] == state(expected)["state_id"]
    served.control("close", owner=other)
    served.flush()
    assert served.info()["store"]["pages_live"] == 0


@pytest.mark.parametrize("length", [4 * CHUNK + 3, 3 * CHUNK, CHUNK - 2])
def test_context_snapshot(length: int, served: Served) -> None:
    """Guards a point in the middle of a segment, whose evidence is in no page: the same ids and
    states after it, and nothing read again.
    """
    owner, tokens, more = served.open(), prompt(9, 2 * CHUNK + 5), prompt(10, length)
    root = state(served.generate(tokens, n=0, owner=owner, custom={"ttt_clear": "drop"}))
    asked = {"ttt_root": root["next_root"]}
    first = served.generate(more, n=0, owner=owner, custom=asked)
    at = {"owner": owner, "parent": rid(first), "offset": length}
    expected = served.generate(prompt(11, 3), n=20, **at)
    saved = served.control(
        "save", owner=owner, rid=rid(first), offset=length, name="kv", kv=True, replace=True
    )
    assert (saved["position"], saved["tail"]) == (length, length % CHUNK)
    served.control("close", owner=owner)
    served.flush()
    other = served.open()
    point = served.control("restore", owner=other, name="kv", kv=True)
    assert point["tokens"] == more
    again = served.generate(prompt(11, 3), n=20, owner=other, parent=point["rid"], offset=length)
    assert again["output_ids"] == expected["output_ids"]
    assert again["meta_info"]["cached_tokens"] == length
    assert state(again)["state_id"] == state(expected)["state_id"]
    served.control("close", owner=other)
    served.flush()
    assert served.info()["store"]["pages_live"] == 0
