"""The "hebbian" recipe: a training-free In-Place TTT conversion of a llama or qwen3 checkpoint.

In-Place TTT (Feng et al. 2026) adds to the down projection W of chosen layers, after every complete
chunk of C tokens, ``lr * V^T H`` with H the rows ``act(gate) * up`` and ``V = conv(T) @ proj`` the
targets. The published method trains ``conv`` and ``proj``. This recipe writes them down instead:
``conv`` picks the next token's embedding, and ``proj`` turns it into the direction of the residual
stream that raises the next token's logit. So a chunk's update is a Hebbian association "after this
h, expect that token".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class HebbianRecipe:
    """Constants of the recipe, measured on SmolLM2-135M-Instruct in float32.

    The layers are those with the strongest effect among those where position 0 is no attention
    sink: there ``|h|^2`` of the first token is about 0, while at layers 27 to 29 it is 11 to 2400
    times the mean and would drown every other association.
    """

    layers: tuple[int, ...] = (24, 25, 26)
    chunk: int = 32
    lr: float = 1.834e-3
    kappa: tuple[float, ...] = (1.834e-3, 2.329e-3, 1.770e-3)  # 1 / mean |h|^2 of each layer
    gain: float = 1.8
    logit_push: float = 0.263  # nats: `logit_push` over the rms of the residual stream, gain 1.8
    taps: tuple[float, ...] = (-0.25, -0.25, -0.25, 1.0, -0.25)  # offsets -2..+2; +1 is the next
    norm_floor: float = 0.3  # final_norm.weight is clamped from below before it is inverted
    frequency_clamp: float = 0.004  # largest share of one token in the corpus mean
    corpus_share: float = 0.8  # the rest of the mean is uniform over the vocabulary


def config_keys(recipe: HebbianRecipe) -> dict[str, Any]:
    """The keys of the published checkpoint format, for config.json."""
    return {
        "ttt_mode": True,
        "ttt_layers": list(recipe.layers),
        "ttt_chunk": recipe.chunk,
        "ttt_lr": recipe.lr,
        "ttt_proj": True,
        "ttt_target": "input_embed",
    }


def token_shares(token_ids: Iterable[int], vocab: int, recipe: HebbianRecipe) -> Tensor:
    """Token shares, float64 [vocab], sum 1: clamped counts of a text, mixed with uniform."""
    ids = torch.tensor(list(token_ids), dtype=torch.long)
    if ids.numel() == 0:
        raise ValueError("token_shares needs at least one token")
    if int(ids.max()) >= vocab:
        raise ValueError(
            f"token {int(ids.max())} is outside the {vocab} embeddings: another model's"
        )
    counts = torch.bincount(ids, minlength=vocab).double()
    shares = (counts / counts.sum()).clamp(max=recipe.frequency_clamp)
    mixed = recipe.corpus_share * shares / shares.sum() + (1 - recipe.corpus_share) / vocab
    return mixed / mixed.sum()


def common_directions(embedding: Tensor, shares: Tensor) -> Tensor:
    """Q, float64 [d, 2]: orthonormal basis of two mean embeddings, by share and over all tokens.

    What every token has in common says nothing about the next one, so ``projection`` removes it.
    """
    table = embedding.double()
    means = torch.stack([shares.double() @ table, table.mean(dim=0)], dim=1)
    basis: Tensor = torch.linalg.qr(means).Q
    return basis


def translation(embedding: Tensor, head: Tensor, shares: Tensor) -> Tensor:
    """M, float64 [d, d]: input embeddings @ M come closest to the rows of an untied head.

    Least squares over the vocabulary, each token weighted by its share, both centred.
    """
    weights = shares.double()
    root = weights.sqrt()[:, None]
    centred = [table.double() - weights @ table.double() for table in (embedding, head)]
    source, target = (root * table for table in centred)
    gram = source.T @ source
    ridge = 1e-6 * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    found: Tensor = torch.linalg.solve(gram + ridge, source.T @ target)
    return found


def projection(
    final_norm: Tensor,
    common: Tensor,
    ratio: float,
    recipe: HebbianRecipe,
    translate: Tensor | None = None,
) -> Tensor:
    """``ttt_proj.weight`` of one layer, float64 [d, d], a right factor: V = conv(T) @ weight.

    ``ratio`` is kappa of the layer over kappa of the first one, which evens out their |h|^2.
    ``translate`` is the ``translation`` of a model whose head is not its embedding table.
    """
    d = common.shape[0]
    scale = 1.0 / final_norm.double().clamp(min=recipe.norm_floor)
    remove = torch.eye(d, dtype=torch.float64) - common @ common.T
    if translate is not None:
        remove = translate.T @ remove
    return (recipe.gain * ratio * scale[:, None] * remove).T.contiguous()


def ttt_weights(
    embedding: Tensor,
    final_norm: Tensor,
    shares: Tensor,
    recipe: HebbianRecipe,
    head: Tensor | None = None,
) -> dict[str, Tensor]:
    """The added tensors by published name, float32: ttt_conv [d, 1, 5], ttt_proj [d, d].

    ``head`` [vocab, d] is that of a model whose head is not its embedding table.
    """
    d = embedding.shape[1]
    common = common_directions(embedding, shares)
    translate = None if head is None else translation(embedding, head, shares)
    taps = torch.tensor(recipe.taps, dtype=torch.float32)
    weights: dict[str, Tensor] = {}
    for layer, kappa in zip(recipe.layers, recipe.kappa, strict=True):
        prefix = f"model.layers.{layer}.mlp"
        weights[f"{prefix}.ttt_conv.weight"] = taps.expand(d, 1, -1).contiguous()
        proj = projection(final_norm, common, kappa / recipe.kappa[0], recipe, translate)
        weights[f"{prefix}.ttt_proj.weight"] = proj.float()
    return weights


def logit_push(
    embedding: Tensor, final_norm: Tensor, shares: Tensor, recipe: HebbianRecipe, head: Tensor
) -> float:
    """How far one association moves its token's logit, per 1/rms of the last residual stream.

    The mean over tokens, by share, of <head row, final_norm * (embedding row @ projection)>.
    """
    common = common_directions(embedding, shares)
    translate = None if head is embedding else translation(embedding, head, shares)
    proj = projection(final_norm, common, 1.0, recipe, translate)
    pushed = (embedding.double() @ proj) * final_norm.double()
    return float(shares.double() @ (pushed * head.double()).sum(1))


def add_hebbian(
    config: dict[str, Any],
    weights: dict[str, Tensor],
    token_ids: Iterable[int],
    recipe: HebbianRecipe | None = None,
) -> None:
    """Turn a checkpoint into a TTT checkpoint: adds to ``config`` and ``weights`` in place.

    ``token_ids`` is an ordinary text, whose token frequencies the recipe needs. The default recipe
    is that of SmolLM2-135M-Instruct. Raises ValueError when its layers are not in the model.
    """
    recipe = recipe or HebbianRecipe()
    depth = config["num_hidden_layers"]
    if max(recipe.layers) >= depth or min(recipe.layers) < 0:
        raise ValueError(f"layers {list(recipe.layers)} are not among the model's 0 to {depth - 1}")
    embedding, final_norm = weights["model.embed_tokens.weight"], weights["model.norm.weight"]
    head = None if config["tie_word_embeddings"] else weights["lm_head.weight"]
    shares = token_shares(token_ids, len(embedding), recipe)
    weights.update(ttt_weights(embedding, final_norm, shares, recipe, head))
    config.update(config_keys(recipe))
