"""BoundaryUpdate of the LoRA delta rule: AdamW on each owner's own adapter, owners batched.

Each row of a batch has its own adapter, so one backward pass over the sum of the rows' losses
gives every owner its own gradient; clipping, moments and selection are per owner too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.backends.lora_config import CLIP_NORM, LoraDeltaConfig
from sgl_rwttt.backends.lora_decoder import DecoderWeights, LayerAdapters, sequence_losses

_BETAS = (0.9, 0.999)
_EPS = 1e-8
_CLIP_EPS = 1e-6

Adapters = dict[str, tuple[Tensor, Tensor]]
"""Per target A [L, G, r, d_in] and B [L, G, d_out, r], float32, of G owners."""


class Outcome(NamedTuple):
    """What a boundary did to one owner."""

    loss: float  # of its segment, under the adapter before the boundary
    steps: int  # AdamW steps taken; 0: the segment was not selected
    finite: bool  # loss, gradient and result


def boundary_update(
    weights: DecoderWeights,
    config: LoraDeltaConfig,
    adapters: Adapters,
    segments: Sequence[Sequence[int]],
    train_tokens: int,
) -> tuple[Adapters, list[Outcome]]:
    """Learn each segment into its owner's adapter; ``adapters`` is not changed.

    Up to ``config.steps`` times: l = mean of -log p over the segment; an owner with l <= tau takes
    no further step; one AdamW step on lambda exp(l - tau) l, the weight detached, the gradient
    clipped at norm 1.0 over the owner's A and B, the moments zero at the boundary. Forward and
    backward take as many owners at a time as fit ``train_tokens`` padded tokens, at least one.
    Segments have at least two tokens.
    """
    size = len(segments)
    longest = max(map(len, segments))
    group = max(1, train_tokens // longest)
    done: list[tuple[Adapters, list[Outcome]]] = []
    with torch.inference_mode(False):
        for first in range(0, size, group):
            some = slice(first, min(first + group, size))
            part = {name: (A[:, some], B[:, some]) for name, (A, B) in adapters.items()}
            done.append(_update(weights, config, part, segments[some]))
    outcomes = [outcome for _, some_outcomes in done for outcome in some_outcomes]
    if len(done) == 1:
        return done[0][0], outcomes
    joined = {
        name: (
            torch.cat([part[name][0] for part, _ in done], dim=1),
            torch.cat([part[name][1] for part, _ in done], dim=1),
        )
        for name in adapters
    }
    return joined, outcomes


def _update(
    weights: DecoderWeights,
    config: LoraDeltaConfig,
    adapters: Adapters,
    segments: Sequence[Sequence[int]],
) -> tuple[Adapters, list[Outcome]]:
    """One micro-batch."""
    tokens, lengths = _padded(segments, weights.embed.device)
    values = [tensor.clone() for pair in adapters.values() for tensor in pair]
    moments = [(torch.zeros_like(value), torch.zeros_like(value)) for value in values]
    active = torch.ones(len(segments), dtype=torch.bool, device=tokens.device)
    steps = torch.zeros(len(segments), dtype=torch.int64, device=tokens.device)
    first_losses: Tensor | None = None
    sound = active.clone()
    for number in range(1, config.steps + 1):
        losses, gradients = _gradients(weights, config, list(adapters), values, tokens, lengths)
        first_losses = losses if first_losses is None else first_losses
        active = active & ~(losses <= config.tau)  # a loss that is not a number goes on, and fails
        if not active.any():
            break
        sound = sound & (losses.isfinite() | ~active)
        steps += active
        _clip(gradients)
        for value, gradient, moment in zip(values, gradients, moments, strict=True):
            _adamw(value, gradient, moment, number, config.lr, active)
    assert first_losses is not None
    for value in values:
        sound = sound & value.isfinite().all(-1).all(-1).all(0)
    pairs = zip(values[::2], values[1::2], strict=True)
    rows = zip(first_losses.tolist(), steps.tolist(), sound.tolist(), strict=True)
    return dict(zip(adapters, pairs, strict=True)), [Outcome(*row) for row in rows]


def _padded(segments: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, segments))
    rows = [[*segment, *[0] * (longest - len(segment))] for segment in segments]
    tokens = torch.tensor(rows, dtype=torch.int64, device=device)
    return tokens, torch.tensor([len(segment) for segment in segments], device=device)


def _gradients(
    weights: DecoderWeights,
    config: LoraDeltaConfig,
    names: list[str],
    values: list[Tensor],
    tokens: Tensor,
    lengths: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Losses [G], and the gradient of each owner's weighted loss for its own part of ``values``."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in values]
        layers = _by_layer(names, leaves)
        losses = sequence_losses(weights, tokens, lengths, layers, config.scale)
        plain = losses.detach()
        excess = plain - config.tau
        selection = config.weight * excess.exp() * (excess > 0)
        gradients = torch.autograd.grad((selection * losses).sum(), leaves)
    return plain, list(gradients)


def _by_layer(names: list[str], leaves: list[Tensor]) -> list[LayerAdapters]:
    depth = leaves[0].shape[0]
    cut = [leaf.unbind(0) for leaf in leaves]
    return [
        {name: (cut[2 * i][layer], cut[2 * i + 1][layer]) for i, name in enumerate(names)}
        for layer in range(depth)
    ]


def _clip(gradients: list[Tensor]) -> None:
    """Scale each owner's gradient, in place, to a norm of at most CLIP_NORM."""
    square = torch.stack([gradient.square().sum((0, 2, 3)) for gradient in gradients]).sum(0)
    factor = (CLIP_NORM / (square.sqrt() + _CLIP_EPS)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor[:, None, None])


def _adamw(
    value: Tensor,
    gradient: Tensor,
    moment: tuple[Tensor, Tensor],
    number: int,
    lr: float,
    active: Tensor,
) -> None:
    """Step ``number`` (from 1) of AdamW without decay, in place, for the active owners."""
    mean, square = moment
    mean.lerp_(gradient, 1 - _BETAS[0])
    square.mul_(_BETAS[1]).addcmul_(gradient, gradient, value=1 - _BETAS[1])
    correction = [1 - beta**number for beta in _BETAS]
    denominator = (square.sqrt() / correction[1] ** 0.5).add_(_EPS)
    moved = value.addcdiv(mean, denominator, value=-lr / correction[0])
    value.copy_(torch.where(active[:, None, None], moved, value))
