"""TTT-Linear checkpoints through the real SGLang engine: the published vectors, and no KV."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.backends.streaming_oracle import EagerTTT
from tests.engine.served import (
    LOGPROBS,
    Served,
    assert_equal_logprobs,
    input_logprobs,
    output_logprobs,
    rid,
    state,
)
from tests.golden_streaming import NAMES, PREFILLS, STARTS, StreamingCase, streaming_case

pytestmark = pytest.mark.engine
SIZE = 16


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> StreamingCase:
    return streaming_case(request.param)


@pytest.fixture(scope="module")
def served(case: StreamingCase, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    engine = Served(
        case.path,
        json_model_override_args='{"max_position_embeddings": 4096}',
        max_total_tokens=None,
        chunked_prefill_size=200,
        ttt_memory_mb=4,
        ttt_snapshot_dir=str(tmp_path_factory.mktemp("snapshots")),
    )
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def cold(served: Served) -> Iterator[None]:
    """Every test starts with empty caches and must leave the books balanced."""
    served.flush()
    yield
    info = served.info()
    assert info["integrity_checked"]
    assert info["store"]["owners"] == 0


def assert_logprobs(got: Tensor, logits: Tensor, what: str) -> None:
    assert_equal_logprobs(got, torch.log_softmax(logits.float(), -1), what)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 128) for _ in range(length)]


def assert_greedy(case: StreamingCase, tokens: list[int], answer: dict[str, Any]) -> None:
    """``answer`` continues ``tokens`` as the eager loop does."""
    eager = EagerTTT(case)
    ids, rows = eager.greedy(eager.feed(tokens)[-1], len(answer["output_ids"]))
    assert answer["output_ids"] == ids, f"prompt of {len(tokens)}"
    assert_logprobs(output_logprobs(answer), rows, f"prompt of {len(tokens)}")


def test_prefill(served: Served, case: StreamingCase) -> None:
    """Guards: lengths that the published code takes apart into whole mini-batches and a rest."""
    for length in PREFILLS:
        served.flush()
        answer = served.generate(case.input_ids[:length], n=1, logprob_start_len=0, **LOGPROBS)
        rows = case.prefill[length]
        assert_logprobs(output_logprobs(answer), rows[-1:], f"{length} tokens, last row")
        if length > 1:
            assert_logprobs(input_logprobs(answer), rows[:-1], f"{length} tokens")


@pytest.mark.parametrize("start", STARTS)
def test_decode_after_prefill(served: Served, case: StreamingCase, start: int) -> None:
    """Guards: a state that is lost or doubled between the requests of a session."""
    owner = served.open()
    last = served.generate(case.input_ids[:start], n=0, owner=owner)
    rows = []
    for at in range(start, 48):
        token = case.input_ids[at : at + 1]
        last = served.generate(token, n=1, owner=owner, parent=rid(last), offset=at, **LOGPROBS)
        assert last["meta_info"]["cached_tokens"] == at
        rows.append(output_logprobs(last))
    assert_logprobs(torch.cat(rows), case.decode[start], f"decode from {start}")
    assert (state(last)["version"], state(last)["tail"]) == (3, 0)
    served.control("close", owner=owner)


def test_greedy_decode_passes_boundaries(served: Served, case: StreamingCase) -> None:
    """Guards: a version that moves early, late or not at all while decoding."""
    tokens = case.input_ids[:5]
    answer = served.generate(tokens, n=60, **LOGPROBS)
    assert_greedy(case, tokens, answer)
    report = state(answer)
    assert (report["version"], report["tail"]) == divmod(64, SIZE)
    for index, version in report["versions"]:
        assert version == (len(tokens) + index - 1) // SIZE


def test_prefill_cut_at_every_position(served: Served, case: StreamingCase) -> None:
    """Guards: a tail or convolution inputs that do not survive a cut."""
    tokens = case.input_ids[: 2 * SIZE + 2]
    eager = EagerTTT(case)
    ids, rows = eager.greedy(eager.feed(tokens)[-1], 4)
    every = 1 if case.name == NAMES[0] else 5
    for cut in range(1, len(tokens), every):
        served.flush()
        owner = served.open()
        first = served.generate(tokens[:cut], n=0, owner=owner)
        second = served.generate(
            tokens[cut:], n=4, owner=owner, parent=rid(first), offset=cut, **LOGPROBS
        )
        assert second["output_ids"] == ids, f"cut at {cut}"
        assert second["meta_info"]["cached_tokens"] == cut
        assert_logprobs(output_logprobs(second), rows, f"cut at {cut}")
        served.control("close", owner=owner)


def test_owners_at_different_offsets(served: Served, case: StreamingCase) -> None:
    """Guards: one offset for the whole batch; owners that meet each other's state."""
    prompts = [prompt(seed, length) for seed, length in enumerate((1, 7, 15, 16, 17, 33, 40, 90))]
    rng = random.Random(3)
    answers = served.run(
        *(
            served.agenerate(tokens, delay=rng.uniform(0, 0.1), n=24, **LOGPROBS)
            for tokens in prompts
        )
    )
    for tokens, answer in zip(prompts, answers, strict=True):
        assert_greedy(case, tokens, answer)


def test_a_prefix_hit_restores_the_state(served: Served, case: StreamingCase) -> None:
    """Guards: a hit of SGLang's tree at a point whose state is not retained."""
    shared = prompt(1, 3 * SIZE + 5)
    served.generate(shared, n=0)
    for seed in range(6):
        tokens = shared + prompt(100 + seed, 1 + 5 * seed)
        answer = served.generate(tokens, n=4, **LOGPROBS)
        assert answer["meta_info"]["cached_tokens"] >= len(shared)
        assert_greedy(case, tokens, answer)
    cut = shared[: 2 * SIZE + 3] + prompt(7, 9)
    answer = served.generate(cut, n=4, **LOGPROBS)
    assert answer["meta_info"]["cached_tokens"] == 2 * SIZE
    assert_greedy(case, cut, answer)


def test_evicted_states_are_computed_again(served: Served, case: StreamingCase) -> None:
    """Guards: a hit without its state once the pools were needed by others."""
    tokens = prompt(2, 4 * SIZE + 3)
    for seed in range(12):
        served.generate(prompt(1000 + seed, 1500), n=0)
        assert_greedy(case, tokens, served.generate(tokens, n=3, **LOGPROBS))
    assert served.info()["store"]["evictions"] > 0


def test_forks_and_rollbacks(served: Served, case: StreamingCase) -> None:
    """Guards: siblings that fill one tail; a rollback that keeps what came after it."""
    tokens, owner = prompt(3, 2 * SIZE + 7), served.open()
    parent = served.generate(tokens, n=0, owner=owner)
    turns = [(prompt(50 + i, 3 * i + 1), len(tokens) - 2 * i) for i in range(5)]
    answers = served.run(
        *(
            served.agenerate(turn, n=20, owner=owner, parent=rid(parent), offset=kept, **LOGPROBS)
            for turn, kept in turns
        )
    )
    for (turn, kept), answer in zip(turns, answers, strict=True):
        assert_greedy(case, tokens[:kept] + turn, answer)
        retained = kept if kept >= 2 * SIZE else SIZE  # a committed version has no tail inside
        assert answer["meta_info"]["cached_tokens"] == retained
    served.control("close", owner=owner)


def test_a_frozen_request_leaves_no_trace(served: Served, case: StreamingCase) -> None:
    """Guards: READ tokens that move the version, the tail or the offset, or see each other."""
    tokens, question, owner = prompt(4, 2 * SIZE + 13), prompt(5, 20), served.open()
    parent = served.generate(tokens, n=0, owner=owner)
    frozen = served.generate(
        question,
        n=6,
        owner=owner,
        parent=rid(parent),
        offset=len(tokens),
        custom={"ttt_mode": "read"},
        **LOGPROBS,
    )
    assert (state(frozen)["version"], state(frozen)["tail"]) == (2, 13)
    eager = EagerTTT(case)
    eager.feed(tokens)
    ids, rows = [], [eager.step(question[-1], write=False)]
    for _ in range(6):
        ids.append(int(rows[-1].argmax()))
        rows.append(eager.step(ids[-1], write=False))
    assert frozen["output_ids"] == ids
    assert_logprobs(output_logprobs(frozen), torch.stack(rows[:6]), "frozen")
    after = served.generate(
        question, n=4, owner=owner, parent=rid(parent), offset=len(tokens), **LOGPROBS
    )
    assert_greedy(case, tokens + question, after)
    length = len(tokens) + len(question) + 6
    thawed = served.generate(
        question, n=4, owner=owner, parent=rid(frozen), offset=length, **LOGPROBS
    )
    assert thawed["output_ids"] == after["output_ids"]
    served.control("close", owner=owner)


def test_the_state_of_a_long_context_is_constant(served: Served, case: StreamingCase) -> None:
    """Guards: KV or pages that grow with the context; chunks of a prefill that lose the state."""
    held = []
    for length in (100, 1000):
        owner = served.open()
        answer = served.generate(
            prompt(6, length), n=2, owner=owner, custom={"ttt_pin": "end"}, **LOGPROBS
        )
        assert_greedy(case, prompt(6, length), answer)
        served.flush()
        store = served.info()["store"]
        held.append((store["pages_live"], store["bases_live"], store["versions"]))
        served.control("close", owner=owner)
    assert held[0] == held[1] == (1, 1, held[0][2])


def test_a_snapshot_holds_the_whole_version(served: Served, case: StreamingCase) -> None:
    """Guards: a restored state without its convolution inputs."""
    tokens, owner = prompt(8, 3 * SIZE), served.open()
    saved = served.generate(tokens, n=0, owner=owner, custom={"ttt_clear": "drop"})
    root = str(state(saved)["next_root"])
    expected = served.generate(tokens[:20], n=20, owner=owner, custom={"ttt_root": root})
    served.control("save", owner=owner, root=root, name="s", replace=True)
    served.control("close", owner=owner)
    served.flush()
    owner = served.open()
    again = str(served.control("restore", owner=owner, name="s")["root"])
    answer = served.generate(tokens[:20], n=20, owner=owner, custom={"ttt_root": again}, **LOGPROBS)
    assert answer["output_ids"] == expected["output_ids"]
    assert_greedy(case, tokens + tokens[:20], answer)
    served.control("close", owner=owner)


def test_a_context_snapshot_goes_on_in_the_middle(served: Served, case: StreamingCase) -> None:
    """Guards: a tail of a restored point without its rows or its convolution inputs; a snapshot
    that takes a model without KV for one whose KV was evicted."""
    for length in (2 * SIZE + 13, 2 * SIZE):
        tokens, turn, owner = prompt(9, length), prompt(10, 9), served.open()
        parent = served.generate(tokens, n=0, owner=owner)
        asked = {"owner": owner, "rid": rid(parent), "offset": length, "name": "kv", "kv": True}
        saved = served.control("save", replace=True, **asked)
        assert saved["position"] == length
        served.control("close", owner=owner)
        served.flush()
        owner = served.open()
        point = served.control("restore", owner=owner, name="kv", kv=True)
        assert point["tokens"] == tokens
        answer = served.generate(
            turn, n=20, owner=owner, parent=point["rid"], offset=length, **LOGPROBS
        )
        assert answer["meta_info"]["cached_tokens"] == length
        assert_greedy(case, tokens + turn, answer)
        served.control("close", owner=owner)


def test_a_request_without_a_state_is_refused(served: Served) -> None:
    """Guards: an answer that knows nothing of the prompt but its last token."""
    with pytest.raises(Exception, match="nothing without its state"):
        served.generate([5, 6], n=2, custom={"ttt_mode": "off"})
