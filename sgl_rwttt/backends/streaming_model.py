"""The TTT-Linear language model: rows of many contexts in one flat batch, states in the backend.

Parameters have the published names (ttt-lm-pytorch), so a checkpoint loads as it is. A forward
needs a step: it answers for the layers' short convolutions and inner learners, which are all that
couples the rows of a context.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sgl_rwttt.backends.streaming import LearnerWeights, StreamingBackend
from sgl_rwttt.backends.streaming_config import StreamingConfig
from sgl_rwttt.backends.streaming_plan import StreamingPlan


class StreamingStep(Protocol):
    """The state's part of one forward pass."""

    def offsets(self, rows: int) -> Tensor:
        """Offset of each row in its mini-batch, [rows] int64."""
        ...

    def recent(self, slot: int, which: int, x: Tensor) -> Tensor:
        """Inputs [N, M + 1, d] of a short convolution, see ``StreamingBackend.recent``."""
        ...

    def learn(self, slot: int, q: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> Tensor:
        """Answers [N, heads, f] of a layer, see ``StreamingBackend.layer_step``."""
        ...


class PlannedStep(NamedTuple):
    """A backend and its plan as a step."""

    backend: StreamingBackend
    plan: StreamingPlan

    def offsets(self, rows: int) -> Tensor:
        """See ``StreamingStep``."""
        return self.backend.offsets(self.plan, rows)

    def recent(self, slot: int, which: int, x: Tensor) -> Tensor:
        """See ``StreamingStep``."""
        return self.backend.recent(self.plan, slot, which, x)

    def learn(self, slot: int, q: Tensor, k: Tensor, v: Tensor, rate: Tensor) -> Tensor:
        """See ``StreamingStep``."""
        return self.backend.layer_step(self.plan, slot, q, k, v, rate)


class Rotation(NamedTuple):
    """Rotary embedding by the offset in the mini-batch; neighbouring numbers form a pair."""

    cos: Tensor  # [N, 1, f / 2]
    sin: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """x [N, heads, f], rotated."""
        a, b = x[..., 0::2], x[..., 1::2]
        turned = (a * self.cos - b * self.sin, b * self.cos + a * self.sin)
        return torch.stack(turned, -1).flatten(2)


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class ShortConv(nn.Module):
    """Causal depthwise convolution; the parameters of an nn.Conv1d."""

    def __init__(self, size: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, 1, taps))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, inputs: Tensor) -> Tensor:
        """inputs [N, taps, d] float32, oldest first; returns [N, d] float32."""
        return torch.einsum("ntd,dt->nd", inputs, self.weight[:, 0].float()) + self.bias.float()


class PreConv(nn.Module):
    """Norm and short convolution in front of a TTT layer."""

    def __init__(self, config: StreamingConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model, config.rms_eps)
        self.conv = ShortConv(config.d_model, config.conv_kernel)

    def forward(self, x: Tensor, slot: int, step: StreamingStep) -> Tensor:
        mixed: Tensor = self.conv(step.recent(slot, 0, self.norm(x)))
        return mixed.to(x.dtype)


class SwiGLU(nn.Module):
    """Gated MLP."""

    def __init__(self, config: StreamingConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.down_proj = nn.Linear(config.d_ff, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class TTTLinear(nn.Module):
    """Projections, rotation and learning rates around the inner learner."""

    def __init__(self, config: StreamingConfig) -> None:
        super().__init__()
        self.config = config
        d, heads, f = config.d_model, config.heads, config.head_dim
        self.q_proj = nn.Linear(d, d, bias=False)
        if config.share_qk:
            self.conv_q = ShortConv(d, config.conv_kernel)
            self.conv_k = ShortConv(d, config.conv_kernel)
        else:
            self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d, bias=False)
        self.o_proj = nn.Linear(d, d, bias=False)
        if config.gate:
            self.g_proj = nn.Linear(d, d, bias=False)
        self.W1 = nn.Parameter(torch.zeros(heads, f, f))
        self.b1 = nn.Parameter(torch.zeros(heads, 1, f))
        self.ttt_norm_weight = nn.Parameter(torch.ones(heads, f))
        self.ttt_norm_bias = nn.Parameter(torch.zeros(heads, f))
        self.learnable_token_idx = nn.Parameter(torch.zeros(config.chunk))
        self.learnable_ttt_lr_weight = nn.Parameter(torch.zeros(heads, 1, d))
        self.learnable_ttt_lr_bias = nn.Parameter(torch.zeros(heads, 1))
        self.post_norm = nn.LayerNorm(d, eps=1e-6)

    @property
    def learner(self) -> LearnerWeights:
        """The weights that the backend takes."""
        return LearnerWeights(
            self.W1,
            self.b1,
            self.ttt_norm_weight,
            self.ttt_norm_bias,
            self.learnable_token_idx,
        )

    def forward(self, x: Tensor, slot: int, step: StreamingStep, turn: Rotation) -> Tensor:
        q = self.q_proj(x)
        if self.config.share_qk:
            inputs = step.recent(slot, int(self.config.pre_conv), q)
            q, k = self.conv_q(inputs), self.conv_k(inputs)
        else:
            k = self.k_proj(x)
        q, k, v = self._heads(q), self._heads(k), self._heads(self.v_proj(x))
        answer = step.learn(slot, turn.apply(q), turn.apply(k), v, self._rate(x))
        mixed = self.post_norm(answer.flatten(1).to(x.dtype))
        if self.config.gate:
            mixed = F.gelu(self.g_proj(x), approximate="tanh") * mixed
        out: Tensor = self.o_proj(mixed)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.float().reshape(-1, self.config.heads, self.config.head_dim)

    def _rate(self, x: Tensor) -> Tensor:
        """lambda [N, heads], float32."""
        weight, bias = self.learnable_ttt_lr_weight[:, 0], self.learnable_ttt_lr_bias[:, 0]
        gate = torch.sigmoid(F.linear(x, weight, bias).float())
        return self.config.base_lr * gate / self.config.head_dim


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: StreamingConfig) -> None:
        super().__init__()
        self.seq_modeling_block = TTTLinear(config)
        self.mlp = SwiGLU(config)
        self.conv = PreConv(config) if config.pre_conv else None
        self.seq_norm = RMSNorm(config.d_model, config.rms_eps)
        self.ffn_norm = RMSNorm(config.d_model, config.rms_eps)

    def forward(self, x: Tensor, slot: int, step: StreamingStep, turn: Rotation) -> Tensor:
        if self.conv is not None:
            x = x + self.conv(x, slot, step)
        x = x + self.seq_modeling_block(self.seq_norm(x), slot, step, turn)
        out: Tensor = x + self.mlp(self.ffn_norm(x))
        return out


class StreamingModel(nn.Module):
    """Embedding, decoder layers and the last norm; hidden states of flat rows."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: StreamingConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab, config.d_model)
        self.layers = nn.ModuleList([Block(config) for _ in config.layers])
        self.norm = RMSNorm(config.d_model, config.rms_eps)
        f = config.head_dim
        frequencies = config.rope_theta ** -(torch.arange(0, f, 2).float() / f)
        angles = torch.arange(config.chunk).float()[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, input_ids: Tensor, step: StreamingStep) -> Tensor:
        """input_ids [N]; returns [N, d]."""
        at = step.offsets(input_ids.shape[0])
        turn = Rotation(self.cos[at][:, None], self.sin[at][:, None])
        x = self.embed_tokens(input_ids)
        for slot, layer in enumerate(self.layers):
            x = layer(x, slot, step, turn)
        out: Tensor = self.norm(x)
        return out

    def hand_over(self, backend: StreamingBackend) -> None:
        """Give the backend every layer's learner."""
        for slot, layer in enumerate(self.layers):
            block = layer.seq_modeling_block
            assert isinstance(block, TTTLinear)
            backend.set_weights(slot, block.learner)
