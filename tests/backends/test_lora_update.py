"""WRITE of the LoRA delta rule against PEFT + autograd + AdamW, one owner at a time."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_rwttt.backends.lora_config import TARGETS
from sgl_rwttt.backends.lora_decoder import shared
from sgl_rwttt.backends.lora_train import boundary_update
from tests.backends.lora_oracle import VOCAB, Owner, tiny_model
from tests.backends.lora_rig import Reads, fused_weights, make_backend

LENGTHS = (3, 9, 16, 23)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


def segments(seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def start_of(backend: Any, owners: int) -> dict[str, tuple[Tensor, Tensor]]:
    return backend.gather([backend.start] * owners)


def same(actual: Tensor, expected: Tensor, name: str) -> None:
    """rtol 1e-4 element by element; a few per tensor may be off by up to 3 % of the largest.

    AdamW's first step is lr g / (|g| + 1e-8): where g is that small, its rounding is most of the
    step, for any two orders of summation.
    """
    assert actual.shape == expected.shape and bool(actual.isfinite().all()), name
    largest = expected.abs().max().item()
    error = (actual - expected).abs()
    far = int((error > 1e-4 * (expected.abs() + largest)).sum())
    assert far <= 1 + actual.numel() // 200, f"{name}: {far} of {actual.numel()} differ"
    assert error.max().item() <= 0.03 * largest, f"{name}: off by {error.max().item():.3g}"


@pytest.mark.parametrize(
    "rule",
    [
        {},
        {"targets": TARGETS, "steps": 2, "lr": 1e-3, "tau": 0.5, "rank": 3, "alpha": 4.0},
    ],
    ids=["published", "two-steps-all-targets"],
)
def test_five_boundaries(model: Any, rule: dict[str, Any]) -> None:
    """Guards gradient, selection weight, clipping, AdamW and the batching of different lengths."""
    backend = make_backend(model, **rule)
    c = backend.config
    start = backend.adapter(Reads())
    owners = [Owner(model, c.targets, c.rank, c.alpha, start) for _ in LENGTHS]
    state = start_of(backend, len(owners))
    for number in range(5):
        evidence = segments(number)
        state, outcomes = boundary_update(fused_weights(model), c, state, evidence, 4096)
        for i, (owner, tokens) in enumerate(zip(owners, evidence, strict=True)):
            loss, steps = owner.boundary(tokens, c.lr, c.tau, c.weight, c.steps)
            assert outcomes[i].loss == pytest.approx(loss, rel=1e-4)
            assert (outcomes[i].steps, outcomes[i].finite) == (steps, True)
            assert steps == c.steps
            for key, expected in owner.tensors().items():
                target, factor = key.split(".")
                actual = state[target][factor == "lora_B"][:, i]
                same(actual, expected, f"owner {i}, boundary {number}, {key}")


def test_owners_do_not_mix(model: Any) -> None:
    """Guards isolation: a batch gives each owner what it gets alone, whoever else is in it."""
    backend = make_backend(model, lr=1e-3)
    c, weights = backend.config, fused_weights(model)
    first, _ = boundary_update(weights, c, start_of(backend, 4), segments(1), 4096)
    evidence = segments(2)
    together, outcomes = boundary_update(weights, c, first, evidence, 4096)
    for i, tokens in enumerate(evidence):
        mine = {key: (A[:, i : i + 1], B[:, i : i + 1]) for key, (A, B) in first.items()}
        alone, (outcome,) = boundary_update(weights, c, mine, [tokens], 4096)
        assert outcome.loss == pytest.approx(outcomes[i].loss, rel=1e-5)
        for key, pair in alone.items():
            for mine_now, all_now in zip(pair, together[key], strict=True):
                same(all_now[:, i], mine_now[:, 0], key)


@pytest.mark.parametrize("train_tokens", [1, 46])
def test_micro_batches(model: Any, train_tokens: int) -> None:
    """Guards the memory bound: it changes how much is computed at a time, not the result."""
    backend = make_backend(model, lr=1e-3, steps=2)
    c, weights = backend.config, fused_weights(model)
    whole, before = boundary_update(weights, c, start_of(backend, 4), segments(3), 4096)
    parts, after = boundary_update(weights, c, start_of(backend, 4), segments(3), train_tokens)
    assert [o.steps for o in before] == [o.steps for o in after] == [2] * 4
    for key, pair in whole.items():
        for expected, actual in zip(pair, parts[key], strict=True):
            same(actual, expected, key)


def test_only_selected_owners_move(model: Any) -> None:
    """Guards the selection: l <= tau means no step and the same bits, beside owners that move."""
    backend = make_backend(model)
    weights, evidence = fused_weights(model), segments(4)
    start = start_of(backend, 4)
    _, seen = boundary_update(weights, backend.config, start, evidence, 4096)
    tau = sorted(outcome.loss for outcome in seen)[1]  # two of four are not above it
    c = make_backend(model, tau=tau).config
    state, outcomes = boundary_update(weights, c, start, evidence, 4096)
    for i, outcome in enumerate(outcomes):
        moved = not torch.equal(state["v_proj"][1][:, i], start["v_proj"][1][:, i])
        assert moved == (outcome.steps == 1) == (seen[i].loss > tau)
    assert sum(outcome.steps for outcome in outcomes) == 2


def test_start_adapter_is_a_function_of_model_and_seed(model: Any) -> None:
    """Guards replay: two servers start from the same A, another seed from another one."""
    one, again = make_backend(model).adapter(Reads()), make_backend(model).adapter(Reads())
    other = make_backend(model, seed=1).adapter(Reads())
    for name, values in one.items():
        assert torch.equal(values, again[name])
        if name.endswith("lora_A"):
            bound = values.shape[-1] ** -0.5
            assert 0.9 * bound < values.abs().max() <= bound  # as nn.init.kaiming_uniform_, a=5**.5
            assert values.flatten(1).unique(dim=0).shape[0] == values.shape[0]
            assert not torch.equal(values, other[name])
        else:
            assert not values.any()


def test_weights_of_inference_mode(model: Any) -> None:
    """Guards the shared base weights: parameters made in inference mode train without a copy."""
    with torch.inference_mode():
        made = torch.randn(6, 4)[1:]
        alias = shared(made)
        assert alias.data_ptr() == made.data_ptr() and torch.equal(alias, made)
    x = torch.randn(3, 4, requires_grad=True)
    torch.nn.functional.linear(x, alias).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, made.sum(0).expand(3, 4).clone())


def test_inside_inference_mode(model: Any) -> None:
    """Guards the call from the server's forward pass, which runs in inference mode."""
    backend = make_backend(model)
    weights = fused_weights(model)
    plain, _ = boundary_update(weights, backend.config, start_of(backend, 4), segments(5), 4096)
    with torch.inference_mode():
        inside, _ = boundary_update(
            weights, backend.config, start_of(backend, 4), segments(5), 4096
        )
    for key in plain:
        assert torch.equal(plain[key][1], inside[key][1])
