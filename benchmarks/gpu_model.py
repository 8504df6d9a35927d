"""A decoder of the Qwen3-4B shape with random weights: one decode step, without a server."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_PAGE = 64  # tokens of a KV page, for flashinfer
_WORKSPACE = 128 << 20  # bytes
_THETA = 1e6  # base of the rotary embedding


@dataclass(frozen=True)
class ModelShape:
    """Sizes of Qwen3-4B; ``state_layers`` of the layers have fast weights."""

    layers: int = 36
    d: int = 2560
    d_ff: int = 9728
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 151_936
    state_layers: tuple[int, ...] = (0, 6, 12, 18, 24, 30)


TINY_MODEL = ModelShape(
    layers=2, d=16, d_ff=24, heads=2, kv_heads=1, head_dim=8, vocabulary=97, state_layers=(1,)
)

# (state slot, h [N, d_ff], target rows [N, d], weight of down_proj [d, d_ff]) -> [N, d]
Down = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Cache:
    """Keys and values of all streams at one common length, filled at random up to it."""

    def __init__(
        self, shape: ModelShape, streams: int, length: int, room: int, place: dict[str, Any]
    ) -> None:
        total = -(-(length + room) // _PAGE) * _PAGE
        size = (shape.layers, streams, total, shape.kv_heads, shape.head_dim)
        self.K, self.V = torch.zeros(size, **place), torch.zeros(size, **place)
        for pool in (self.K, self.V):
            for layer in pool:
                layer[:, :length].normal_()
        self.length, self.start = length, length

    def reset(self) -> None:
        """Back to the length at the start."""
        self.length = self.start


class Sdpa:
    """torch's scaled dot product attention."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def plan(self, streams: slice) -> None:
        """Called once per step, before the layers."""
        self.streams = streams

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """q [N, heads, head_dim] over the first ``length + 1`` tokens of each stream."""
        end = self.cache.length + 1
        k, v = (
            pool[layer, self.streams, :end].transpose(1, 2) for pool in (self.cache.K, self.cache.V)
        )
        out = F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)
        return out[:, :, 0]


class FlashInfer:
    """flashinfer's decode attention over KV pages."""

    def __init__(self, cache: Cache, shape: ModelShape) -> None:
        import flashinfer

        self.cache, self.shape = cache, shape
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=cache.K.device)
        self.wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, streams: slice) -> None:
        """Called once per step, before the layers."""
        self.streams = streams
        count, pages = streams.stop - streams.start, self.cache.K.shape[2] // _PAGE
        used = -(-(self.cache.length + 1) // _PAGE)
        last = self.cache.length + 1 - (used - 1) * _PAGE
        indices = [stream * pages + page for stream in range(count) for page in range(used)]
        tables = ([i * used for i in range(count + 1)], indices, [last] * count)
        shape = self.shape
        self.wrapper.plan(
            *(torch.tensor(t, dtype=torch.int32, device=self.cache.K.device) for t in tables),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            _PAGE,
            q_data_type=self.cache.K.dtype,
            kv_data_type=self.cache.K.dtype,
        )

    def __call__(self, layer: int, q: Tensor) -> Tensor:
        """As ``Sdpa.__call__``."""
        pages = tuple(
            pool[layer, self.streams].view(-1, _PAGE, self.shape.kv_heads, self.shape.head_dim)
            for pool in (self.cache.K, self.cache.V)
        )
        return self.wrapper.run(q, pages)


def attention(name: str, cache: Cache, shape: ModelShape) -> Any:
    """The implementation called ``name``; "auto" is flashinfer on a GPU that has it."""
    found = importlib.util.find_spec("flashinfer") is not None and cache.K.is_cuda
    if name == "flashinfer" or (name == "auto" and found):
        return FlashInfer(cache, shape)
    return Sdpa(cache)


class Model:
    """Random weights; ``step`` decodes one token of every stream."""

    def __init__(self, shape: ModelShape, place: dict[str, Any]) -> None:
        self.shape = shape
        s, qkv = shape, (shape.heads + 2 * shape.kv_heads) * shape.head_dim

        def weight(rows: int, columns: int) -> Tensor:
            return torch.empty(rows, columns, **place).normal_(std=columns**-0.5)

        self.embedding = weight(s.vocabulary, s.d)
        self.qkv = [weight(qkv, s.d) for _ in range(s.layers)]
        self.o = [weight(s.d, s.heads * s.head_dim) for _ in range(s.layers)]
        self.gate_up = [weight(2 * s.d_ff, s.d) for _ in range(s.layers)]
        self.down = [weight(s.d, s.d_ff) for _ in range(s.layers)]
        self.slots = {layer: slot for slot, layer in enumerate(s.state_layers)}
        powers = torch.arange(0, s.head_dim, 2, device=place["device"]) / s.head_dim
        self.frequencies = _THETA**-powers

    def step(self, tokens: Tensor, cache: Cache, attend: Any, streams: slice, down: Down) -> Tensor:
        """Decode tokens [N] of ``streams``; returns the next tokens. The cache grows by one."""
        attend.plan(streams)
        angles = cache.length * self.frequencies
        turn = torch.cat([angles, angles])
        cos, sin = turn.cos().to(self.embedding.dtype), turn.sin().to(self.embedding.dtype)
        x = self.embedding[tokens]
        for layer in range(self.shape.layers):
            x = x + self._attention(layer, _norm(x), cache, attend, streams, cos, sin)
            x = x + self._mlp(layer, _norm(x), down)
        cache.length += 1
        return (_norm(x) @ self.embedding.T).argmax(-1)

    def _attention(
        self,
        layer: int,
        x: Tensor,
        cache: Cache,
        attend: Any,
        streams: slice,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        s = self.shape
        heads = (x @ self.qkv[layer].T).view(x.shape[0], -1, s.head_dim)
        q, k, v = heads.split([s.heads, s.kv_heads, s.kv_heads], 1)
        cache.K[layer, streams, cache.length] = _rotate(_norm(k), cos, sin)
        cache.V[layer, streams, cache.length] = v
        out = attend(layer, _rotate(_norm(q), cos, sin))
        return out.reshape(x.shape[0], -1) @ self.o[layer].T

    def _mlp(self, layer: int, x: Tensor, down: Down) -> Tensor:
        gate, up = (x @ self.gate_up[layer].T).chunk(2, -1)
        h = F.silu(gate) * up
        slot = self.slots.get(layer)
        if slot is None:
            return h @ self.down[layer].T
        return down(slot, h, x, self.down[layer])


def state_weights(model: Model) -> Sequence[Tensor]:
    """down_proj of the state layers, in slot order."""
    return [model.down[layer] for layer in model.shape.state_layers]


def _norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
