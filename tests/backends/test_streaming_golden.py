"""The streaming rule against the published TTT-Linear code, through the real store."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.backends.streaming_rig import StreamingRig
from tests.golden_streaming import NAMES, PREFILLS, STARTS, StreamingCase, streaming_case

TOLERANCE = 1e-4  # absolute, on logits


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest) -> StreamingCase:
    return streaming_case(request.param)


def assert_logits(got: Tensor, expected: Tensor, what: str = "") -> None:
    assert got.shape == expected.shape, what
    worst = (got - expected).abs().max().item()
    assert worst < TOLERANCE, f"{what}: off by {worst:.2e}"


@pytest.mark.parametrize("length", PREFILLS)
def test_prefill(case: StreamingCase, length: int) -> None:
    """Guards: the dual form, the rotation, the rates and the convolutions at odd lengths."""
    rig = StreamingRig(case)
    assert_logits(rig.write(rig.start(), case.input_ids[:length]), case.prefill[length])


@pytest.mark.parametrize("start", STARTS)
def test_decode_after_prefill(case: StreamingCase, start: int) -> None:
    """Guards: a tail that is not what the prefill left, a boundary that comes early or late."""
    rig = StreamingRig(case)
    state = rig.start()
    rig.write(state, case.input_ids[:start])
    rows = [rig.write(state, [token]) for token in case.input_ids[start:48]]
    assert_logits(torch.cat(rows), case.decode[start])


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("fold_pages", [1, 0], ids=["dense", "chain"])
def test_state_after_48_tokens(case: StreamingCase, start: int, fold_pages: int) -> None:
    """Guards: a committed state that gives the right answers by accident of the test's weights."""
    rig = StreamingRig(case, fold_pages=fold_pages)
    state = rig.start()
    rig.write(state, case.input_ids[:start])
    for token in case.input_ids[start:48]:
        rig.write(state, [token])
    view = rig.store.view(state)
    assert (view.number, view.rows) == (3, 0)
    for slot in range(len(rig.config.layers)):
        W, b = rig.backend.state(view.base, view.pages, slot)
        assert_logits(W, case.state[start, slot, "W1_states"])
        assert_logits(b[:, None], case.state[start, slot, "b1_states"])


def test_prefill_from_every_length(case: StreamingCase) -> None:
    """Guards: a cut inside a mini-batch (the published code decodes from multiples of 16 only)."""
    tokens, expected = case.input_ids[:48], case.prefill[48]
    for cut in range(1, 48):
        rig = StreamingRig(case)
        state = rig.start()
        rows = torch.cat([rig.write(state, tokens[:cut]), rig.write(state, tokens[cut:])])
        assert_logits(rows, expected, f"cut at {cut}")


def test_decode_from_every_length(case: StreamingCase) -> None:
    """Guards: decode after a prefill that ended inside a mini-batch."""
    tokens, expected = case.input_ids[:48], case.prefill[48]
    for cut in range(1, 48, 3):
        rig = StreamingRig(case)
        state = rig.start()
        rows = [rig.write(state, tokens[:cut])]
        rows += [rig.write(state, [token]) for token in tokens[cut:]]
        assert_logits(torch.cat(rows), expected, f"cut at {cut}")


def test_bfloat16_weights(case: StreamingCase) -> None:
    """Guards: layers that mix dtypes, a state that is rounded to the model's dtype."""
    rig = StreamingRig(case)
    rig.model.bfloat16()
    rig.head = rig.head.bfloat16()
    rig.model.hand_over(rig.backend)
    state = rig.start()
    rows = [rig.write(state, case.input_ids[:20])]
    rows += [rig.write(state, [token]) for token in case.input_ids[20:48]]
    assert rig.backend.W.dtype == torch.float32
    assert (torch.cat(rows).float() - case.prefill[48]).abs().max() < 0.3
