"""TTT-Linear token by token, eagerly: accumulators, autograd for the inner gradient, no batches."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.golden_streaming import StreamingCase


class EagerTTT:
    """One context of a checkpoint. Shares no code with the package."""

    def __init__(self, case: StreamingCase) -> None:
        self.w, self.c = case.weights(), case.config
        self.heads, self.size = self.c["num_attention_heads"], self.c["mini_batch_size"]
        self.layers: list[dict[str, Any]] = []
        for n in range(self.c["num_hidden_layers"]):
            at = f"model.layers.{n}.seq_modeling_block."
            W, b = self.w[at + "W1"], self.w[at + "b1"]
            self.layers.append(
                {"W": W, "b": b, "GW": torch.zeros_like(W), "Gb": torch.zeros_like(b), "i": 0}
            )

    def copy(self) -> EagerTTT:
        """The same point of another context."""
        twin = copy.copy(self)
        twin.layers = [dict(state) for state in self.layers]  # tensors are replaced, not changed
        return twin

    def step(self, token: int, write: bool = True) -> Tensor:
        """Logits [vocab] after one token; a READ token (not ``write``) leaves nothing."""
        before = self.copy().layers
        x = self.w["model.embed_tokens.weight"][token]
        for n, state in enumerate(self.layers):
            x = self._layer(f"model.layers.{n}.", state, x)
        if not write:
            self.layers = before
        return self.w["lm_head.weight"] @ self._rms("model.norm", x)

    def feed(self, tokens: list[int], write: bool = True) -> Tensor:
        """Logits [n, vocab] after each token."""
        return torch.stack([self.step(token, write) for token in tokens])

    def greedy(self, last: Tensor, count: int) -> tuple[list[int], Tensor]:
        """``count`` tokens after logits ``last``: ids, and the logits each came from."""
        ids, rows = [], [last]
        for _ in range(count):
            ids.append(int(rows[-1].argmax()))
            rows.append(self.step(ids[-1]))
        return ids, torch.stack(rows[:-1])

    def _layer(self, at: str, state: dict[str, Any], x: Tensor) -> Tensor:
        if self.c["pre_conv"]:
            x = x + self._conv(at + "conv.conv", state, self._rms(at + "conv.norm", x))
        x = x + self._ttt(at + "seq_modeling_block.", state, self._rms(at + "seq_norm", x))
        h = self._rms(at + "ffn_norm", x)
        gate, up = self.w[at + "mlp.gate_proj.weight"] @ h, self.w[at + "mlp.up_proj.weight"] @ h
        return x + self.w[at + "mlp.down_proj.weight"] @ (F.silu(gate) * up)

    def _ttt(self, at: str, state: dict[str, Any], x: Tensor) -> Tensor:
        w, i = self.w, state["i"]
        q, v = w[at + "q_proj.weight"] @ x, w[at + "v_proj.weight"] @ x
        if self.c["share_qk"]:
            k = self._conv(at + "conv_k", state, q)
            q = self._conv(at + "conv_q", state, q)
        else:
            k = w[at + "k_proj.weight"] @ x
        q, k, v = (t.view(self.heads, 1, -1) for t in (q, k, v))
        q, k = self._rotate(q, i), self._rotate(k, i)
        gamma, beta = w[at + "ttt_norm_weight"][:, None], w[at + "ttt_norm_bias"][:, None]

        def norm(z: Tensor) -> Tensor:
            return F.layer_norm(z, z.shape[-1:], eps=1e-6) * gamma + beta

        W, b = state["W"].clone().requires_grad_(), state["b"].clone().requires_grad_()
        loss = 0.5 * (norm(k @ W + b) - (v - k)).square().sum((1, 2))
        rate = w[at + "learnable_ttt_lr_weight"][:, 0] @ x + w[at + "learnable_ttt_lr_bias"][:, 0]
        rate = self.c["ttt_base_lr"] * rate.sigmoid() / q.shape[-1]
        gW, gb = torch.autograd.grad((rate * loss).sum(), (W, b))
        state["GW"], state["Gb"] = state["GW"] + gW, state["Gb"] + gb
        tau = (1 / (i + 1) + w[at + "learnable_token_idx"][i]).clamp_min(0)
        W_i, b_i = state["W"] - tau * state["GW"], state["b"] - tau * state["Gb"]
        out = (q + norm(q @ W_i + b_i)).flatten()
        state["i"] = i + 1
        if state["i"] == self.size:
            zeros = torch.zeros_like(W_i), torch.zeros_like(b_i)
            state.update(W=W_i, b=b_i, GW=zeros[0], Gb=zeros[1], i=0)
        out = F.layer_norm(
            out, out.shape, w[at + "post_norm.weight"], w[at + "post_norm.bias"], 1e-6
        )
        if self.c["use_gate"]:
            out = F.gelu(w[at + "g_proj.weight"] @ x, approximate="tanh") * out
        return w[at + "o_proj.weight"] @ out

    def _conv(self, name: str, state: dict[str, Any], x: Tensor) -> Tensor:
        weight = self.w[name + ".weight"][:, 0]
        history = state.get(name, torch.zeros_like(weight))
        state[name] = torch.cat([history[:, 1:], x[:, None]], 1)
        return (state[name] * weight).sum(1) + self.w[name + ".bias"]

    def _rms(self, name: str, x: Tensor) -> Tensor:
        return self.w[name + ".weight"] * x * (x.square().mean() + self.c["rms_norm_eps"]).rsqrt()

    def _rotate(self, x: Tensor, i: int) -> Tensor:
        f = x.shape[-1]
        angle = i * self.c["rope_theta"] ** (-torch.arange(0, f, 2) / f)
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        turned = turned * torch.polar(torch.ones(f // 2), angle)
        return torch.view_as_real(turned).flatten(-2)
