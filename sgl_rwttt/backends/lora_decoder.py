"""The differentiable forward pass of the LoRA delta rule, over the serving model's own weights.

Llama and qwen3 architecture: RMSNorm, neox rotary embedding, grouped-query attention, SwiGLU, with
an RMSNorm over the heads of q and k in qwen3. The projections are fused as SGLang keeps them. Each
row of a batch is a token sequence of its own with an adapter of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_rwttt.backends.lora_config import DecoderShape

LayerAdapters = Mapping[str, tuple[Tensor, Tensor]]
"""Per target the A [G, r, d_in] and B [G, d_out, r] of one layer."""


class Linear(NamedTuple):
    """A projection: weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    input_norm: Tensor  # [d]
    qkv: Linear  # q, k and v rows in this order
    o: Linear
    post_norm: Tensor  # [d]
    gate_up: Linear  # gate rows, then up rows
    down: Linear
    q_norm: Tensor | None = None  # [head_dim]
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder; nothing of it is copied or changed."""

    shape: DecoderShape
    embed: Tensor  # [vocab, d]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [d]
    head: Tensor  # [vocab or more, d]; rows beyond `vocab` are padding
    rotary: Tensor  # [positions, rotary dim]: cosines, then sines
    eps: float
    vocab: int


def shared(tensor: Tensor) -> Tensor:
    """A tensor over the same memory that autograd can use.

    Tensors made in inference mode cannot be saved for a backward pass, and neither can their views.
    """
    with torch.inference_mode(False):
        if not tensor.is_inference():
            return tensor.detach()
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        storage = tensor.untyped_storage()
        alias.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        return alias


def sequence_losses(
    weights: DecoderWeights,
    tokens: Tensor,
    lengths: Tensor,
    adapters: list[LayerAdapters],
    scale: float,
) -> Tensor:
    """Mean of -log p(x_t | x_<t) over t = 1 .. length - 1 of each row, [G] float32.

    tokens [G, T] int64, right-padded with any ids; lengths [G] at least 2. Causal attention keeps
    the padding out of every position before it. Differentiable in the adapters.
    """
    hidden = F.embedding(tokens, weights.embed)
    rotary = weights.rotary[: tokens.shape[1]]
    for layer, adapter in zip(weights.layers, adapters, strict=True):
        hidden = _layer(weights, layer, hidden, rotary, adapter, scale)
    hidden = _rms_norm(hidden, weights.norm, weights.eps)
    logits = F.linear(hidden[:, :-1], weights.head)[..., : weights.vocab].float()
    losses = F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    places = torch.arange(1, tokens.shape[1], device=tokens.device)
    counted = places < lengths[:, None]
    return losses.masked_fill(~counted, 0.0).sum(1) / (lengths - 1)


def _layer(
    weights: DecoderWeights,
    layer: LayerWeights,
    hidden: Tensor,
    rotary: Tensor,
    adapter: LayerAdapters,
    scale: float,
) -> Tensor:
    x = _rms_norm(hidden, layer.input_norm, weights.eps)
    mixed = _attention(weights, layer, x, rotary, adapter, scale)
    hidden = hidden + _projected(mixed, layer.o, ("o_proj",), adapter, scale)[0]
    x = _rms_norm(hidden, layer.post_norm, weights.eps)
    gate, up = _projected(x, layer.gate_up, ("gate_proj", "up_proj"), adapter, scale)
    inner = F.silu(gate) * up
    return hidden + _projected(inner, layer.down, ("down_proj",), adapter, scale)[0]


def _attention(
    weights: DecoderWeights,
    layer: LayerWeights,
    x: Tensor,
    rotary: Tensor,
    adapter: LayerAdapters,
    scale: float,
) -> Tensor:
    """Causal attention before the output projection, [G, T, heads * head_dim].

    Written out, because AdamW turns a gradient's rounding into a full step: where the gradient is
    zero, as for the q of a first token, it is exactly zero here. Segments are short.
    """
    shape = weights.shape
    sizes = [n * shape.head_dim for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
    names = ("q_proj", "k_proj", "v_proj")
    parts = _projected(x, layer.qkv, names, adapter, scale, sizes)
    rows = (*x.shape[:2], -1, shape.head_dim)
    q, k, v = (part.reshape(rows).transpose(1, 2) for part in parts)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = _rms_norm(q, layer.q_norm, weights.eps)
        k = _rms_norm(k, layer.k_norm, weights.eps)
    q, k = _rotate(q, rotary), _rotate(k, rotary)
    shared_by = shape.heads // shape.kv_heads
    k, v = (each.repeat_interleave(shared_by, dim=1) for each in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * shape.head_dim**-0.5
    places = torch.arange(x.shape[1], device=x.device)
    scores = scores.masked_fill(places > places[:, None], float("-inf"))
    mixed: Tensor = scores.softmax(-1).to(v.dtype) @ v
    return mixed.transpose(1, 2).flatten(2)


def _projected(
    x: Tensor,
    linear: Linear,
    names: tuple[str, ...],
    adapter: LayerAdapters,
    scale: float,
    sizes: list[int] | None = None,
) -> list[Tensor]:
    """A fused projection of x [G, T, d_in], cut into ``names``, each with its adapter's part."""
    parts = F.linear(x, linear.weight, linear.bias)
    cut = parts.chunk(len(names), -1) if sizes is None else torch.split(parts, sizes, -1)
    outputs = []
    for name, part in zip(names, cut, strict=True):
        if name in adapter:
            A, B = adapter[name]
            inner = torch.bmm(x.to(A.dtype), A.transpose(1, 2))
            part = part + (scale * torch.bmm(inner, B.transpose(1, 2))).to(part.dtype)
        outputs.append(part)
    return outputs


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * weight.float()).to(x.dtype)


def _rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Neox rotary embedding of x [G, heads, T, head_dim]; rotary [T, width], width <= head_dim."""
    width = rotary.shape[-1]
    cos, sin = rotary.to(x.dtype).chunk(2, -1)
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, -1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*pair, rest), -1)
