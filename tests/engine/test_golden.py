"""The published In-Place TTT implementation, reproduced through the real SGLang engine."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.engine.served import (
    LOGPROBS,
    Served,
    assert_equal_logprobs,
    input_logprobs,
    output_logprobs,
    rid,
    state,
)
from tests.golden import GoldenCase, golden_case, golden_names

pytestmark = pytest.mark.engine
EVERY_CUT = "llama_hidden_proj"  # cut at every position; the others at some, to save time


@pytest.fixture(scope="module", params=golden_names())
def case(request: pytest.FixtureRequest) -> GoldenCase:
    return golden_case(request.param)


@pytest.fixture(scope="module")
def served(case: GoldenCase) -> Iterator[Served]:
    engine = Served(case.path)
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


def expected_outputs(case: GoldenCase) -> Tensor:
    """[G, vocab]: the distribution each generated token was taken from."""
    rows = torch.cat([case.prefill_logits[-1:], case.decode_logits[:-1]])
    return torch.log_softmax(rows.float(), -1)


def test_one_shot_prefill(served: Served, case: GoldenCase) -> None:
    """Guards: chunks of one prefill reading their own later update, or none."""
    answer = served.generate(case.prompt_ids, n=1, logprob_start_len=0, **LOGPROBS)
    expected = torch.log_softmax(case.prefill_logits.float(), -1)
    assert_equal_logprobs(input_logprobs(answer), expected[:-1], "prefill")
    assert_equal_logprobs(output_logprobs(answer), expected[-1:], "prefill's last row")


def test_decode(served: Served, case: GoldenCase) -> None:
    """Guards: a boundary during decode that updates early, late or from the wrong rows."""
    count = len(case.generated_ids)
    answer = served.generate(case.prompt_ids, n=count, **LOGPROBS)
    assert answer["output_ids"] == case.generated_ids
    assert_equal_logprobs(output_logprobs(answer), expected_outputs(case), "decode")
    report, chunk = state(answer), case.config["ttt_chunk"]
    consumed = len(case.prompt_ids) + count - 1
    assert report["position"] == consumed
    assert (report["version"], report["tail"]) == divmod(consumed, chunk)
    for index, version in report["versions"]:
        position = len(case.prompt_ids) + index - 1  # of the token that sampled this output
        assert version == position // chunk


def test_replay_of_generated_tokens(served: Served, case: GoldenCase) -> None:
    """Guards: prefill and decode of the same tokens leaving different states."""
    tokens = case.prompt_ids + case.generated_ids
    answer = served.generate(tokens, n=1, logprob_start_len=0, **LOGPROBS)
    expected = torch.log_softmax(case.replay_logits.float(), -1)
    assert_equal_logprobs(input_logprobs(answer), expected[:-1], "replay")


def test_prefill_cut_at_every_position(served: Served, case: GoldenCase) -> None:
    """Guards: a tail carried over a cut (open page, copy-on-write) that loses or doubles rows."""
    tokens = case.prompt_ids
    expected = expected_outputs(case)[:4]
    every = 1 if case.name == EVERY_CUT else 5  # the others' shapes meet boundaries and tails too
    for cut in range(1, len(tokens), every):
        served.flush()
        owner = served.open()
        first = served.generate(tokens[:cut], n=0, owner=owner)
        assert state(first)["position"] == cut
        second = served.generate(
            tokens[cut:], n=4, owner=owner, parent=rid(first), offset=cut, **LOGPROBS
        )
        assert second["output_ids"] == case.generated_ids[:4], f"cut at {cut}"
        assert second["meta_info"]["cached_tokens"] == cut, f"cut at {cut} prefilled again"
        assert_equal_logprobs(output_logprobs(second), expected, f"cut at {cut}")
        served.control("close", owner=owner)


def test_eight_owners_at_different_offsets(served: Served, case: GoldenCase) -> None:
    """Guards: rows of a batch meeting another owner's pages when owners join and leave."""
    tokens = case.prompt_ids + case.generated_ids
    starts = [len(case.prompt_ids) + k for k in range(8)]
    rng = random.Random(7)
    for _round in range(2):
        served.flush()
        order = rng.sample(starts, len(starts))
        answers = served.run(
            *(
                served.agenerate(
                    tokens[:start], delay=rng.uniform(0, 0.1), n=len(tokens) - start, **LOGPROBS
                )
                for start in order
            )
        )
        table = torch.log_softmax(case.replay_logits.float(), -1)
        for start, answer in zip(order, answers, strict=True):
            assert answer["output_ids"] == tokens[start:], f"owner that began at {start}"
            assert_equal_logprobs(
                output_logprobs(answer), table[start - 1 : -1], f"owner that began at {start}"
            )
