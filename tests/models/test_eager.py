"""The eager model against what the published In-Place TTT code computed."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from sgl_rwttt.models.checkpoint import Checkpoint
from sgl_rwttt.models.eager import EagerModel
from tests.golden import GoldenCase, golden_case

CASE = golden_case("llama_embed_proj")
IDS = [*CASE.prompt_ids, *CASE.generated_ids]


def eager(case: GoldenCase) -> EagerModel:
    def encode(_text: str, _special: bool) -> list[int]:
        raise AssertionError

    return EagerModel(Checkpoint(dict(case.config), case.weights(), encode, {}, "float32"))


def test_fast_weights_are_those_of_the_published_code() -> None:
    """A held-out check of another rule than the one that is served."""
    model = eager(CASE)
    model.write(IDS)
    for layer, expected in CASE.final_fast_weight.items():
        found = model.model.model.layers[layer].mlp.down_proj.weight.detach()
        moved = (expected - CASE.initial_weight[layer]).abs().max()
        assert (found - expected).abs().max() < 1e-3 * moved


def test_reset_is_exact() -> None:
    """The next document of a check begins on the weights of the one before."""
    model = eager(CASE)
    before = model.loss(IDS)
    model.write(IDS)
    assert model.loss(IDS) != before
    model.write(IDS)
    model.reset()
    assert model.loss(IDS) == before


def test_loss_is_that_of_transformers() -> None:
    """Weights that share memory with a checkpoint and lost their rotary table or their head."""
    model = eager(CASE)
    oracle = LlamaForCausalLM.from_pretrained(CASE.path).eval()
    tokens = torch.tensor([IDS])
    with torch.no_grad():
        expected = float(oracle(tokens, labels=tokens).loss)
    assert model.loss(IDS) == pytest.approx(expected, abs=1e-5)
