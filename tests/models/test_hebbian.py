"""The hebbian recipe's tensors, on random embeddings of toy size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sgl_rwttt.backends.in_place import InPlaceConfig
from sgl_rwttt.models.hebbian import (
    HebbianRecipe,
    add_hebbian,
    common_directions,
    config_keys,
    projection,
    token_shares,
    translation,
    ttt_weights,
)

D, VOCAB = 12, 500
RECIPE = HebbianRecipe()


@pytest.fixture
def embedding() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(VOCAB, D, generator=generator) + 0.7  # a common direction to take away


@pytest.fixture
def shares() -> Tensor:
    return token_shares([7] * 50 + list(range(100)), VOCAB, RECIPE)


def test_names_shapes_and_taps(embedding: Tensor, shares: Tensor) -> None:
    """A loader of the published format finds nothing, or the tap of the wrong neighbour is 1."""
    weights = ttt_weights(embedding, torch.ones(D), shares, RECIPE)
    expected = {
        f"model.layers.{layer}.mlp.ttt_{part}.weight"
        for layer in (24, 25, 26)
        for part in ("conv", "proj")
    }
    assert set(weights) == expected
    conv = weights["model.layers.25.mlp.ttt_conv.weight"]
    assert conv.shape == (D, 1, 5)
    assert torch.equal(conv, torch.tensor([-0.25, -0.25, -0.25, 1.0, -0.25]).expand(D, 1, 5))
    assert conv.sum().abs() < 1e-6
    assert weights["model.layers.24.mlp.ttt_proj.weight"].shape == (D, D)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}


def test_common_directions_are_orthonormal_and_span_both_means(
    embedding: Tensor, shares: Tensor
) -> None:
    """Q misses the plain mean when the two means are nearly parallel and are not orthogonalised."""
    common = common_directions(embedding, shares)
    assert torch.allclose(common.T @ common, torch.eye(2, dtype=torch.float64), atol=1e-12)
    for mean in (embedding.double().mean(0), shares @ embedding.double()):
        assert torch.allclose(common @ (common.T @ mean), mean, atol=1e-12)


def test_projection_is_a_right_factor(embedding: Tensor, shares: Tensor) -> None:
    """Stored for use as a Linear weight (transposed), it would scale first and project after."""
    common = common_directions(embedding, shares)
    norm = torch.linspace(0.1, 2.0, D)
    weight = projection(norm, common, 1.27, RECIPE)
    row = embedding[3].double()
    by_hand = row - common @ (common.T @ row)
    by_hand = 1.8 * 1.27 * by_hand / norm.clamp(min=0.3).double()
    assert torch.allclose(row @ weight, by_hand, atol=1e-12)
    assert (common.T @ weight).abs().max() < 1e-12


def test_token_shares_clamp_and_mix() -> None:
    """One very frequent token would become the whole mean."""
    recipe = HebbianRecipe(frequency_clamp=0.4)
    shares = token_shares([1] * 90 + [2] * 10, 4, recipe)
    text = torch.tensor([0.0, 0.4 / 0.5, 0.1 / 0.5, 0.0], dtype=torch.float64)
    assert torch.allclose(shares, 0.8 * text + 0.2 / 4)
    with pytest.raises(ValueError, match="at least one token"):
        token_shares([], 4, recipe)


def test_config_keys_are_what_the_backend_reads() -> None:
    """The converter and the rule disagree on a key or a type of the published format."""
    base = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536}
    keys = {**base, "hidden_act": "silu", **config_keys(RECIPE)}
    config = InPlaceConfig.from_hf(SimpleNamespace(**keys))
    assert config.layers == (24, 25, 26)
    assert (config.chunk, config.lr, config.proj) == (32, 1.834e-3, True)
    assert config.target == "input_embed"


def test_translation_finds_the_head(embedding: Tensor, shares: Tensor) -> None:
    """A token's own embedding is written where its row of an untied head was meant."""
    turn = torch.linalg.qr(torch.randn(D, D, dtype=torch.float64)).Q
    head = 2.5 * embedding.double() @ turn + 4.0  # another common direction, which cancels
    found = translation(embedding, head, shares)
    assert torch.allclose(found, 2.5 * turn, atol=1e-4)
    assert torch.allclose(
        translation(embedding, embedding, shares), torch.eye(D).double(), atol=1e-4
    )
    tied = ttt_weights(embedding, torch.ones(D), shares, RECIPE)
    untied = ttt_weights(embedding, torch.ones(D), shares, RECIPE, head)
    name = "model.layers.24.mlp.ttt_proj.weight"
    assert torch.allclose(tied[name].double() @ found, untied[name].double(), atol=1e-4)


def test_another_model_is_refused() -> None:
    """Tensors for layers that the model does not have; ids of another tokenizer."""
    config = {"num_hidden_layers": 26, "tie_word_embeddings": True}
    weights: dict[str, Tensor] = {
        "model.embed_tokens.weight": torch.zeros(VOCAB, D),
        "model.norm.weight": torch.ones(D),
    }
    with pytest.raises(ValueError, match="0 to 25"):
        add_hebbian(config, weights, [1, 2])
    config["num_hidden_layers"] = 27
    with pytest.raises(ValueError, match="token 500"):
        add_hebbian(config, weights, [1, VOCAB])
    assert len(weights) == 2
    assert "ttt_mode" not in config
