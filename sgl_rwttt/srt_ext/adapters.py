"""LoRA deltas on a stock SGLang model: hooks on its projections, its weights for training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sgl_rwttt.backends.lora_config import DecoderShape
from sgl_rwttt.backends.lora_decoder import DecoderWeights, LayerWeights, Linear, shared
from sgl_rwttt.backends.lora_peft import load_adapter
from sgl_rwttt.backends.lora_slots import initial_adapter

from .fingerprint import Recorder
from .options import TTTOptions
from .rules import lora_configs
from .runtime import TTTRuntime
from .seams import SeamError
from .step import TTTStep, forward_step

_Cut = tuple[str, int, int]  # target, first and last column of its part of the output


class AdapterCausalLM:
    """Mixed in front of a llama- or qwen3-architecture causal LM of SGLang.

    Served with ``--ttt-backend lora_delta``. The model owns the state runtime (``ttt``).
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.ttt_configs = lora_configs(TTTOptions.from_env(), config)
        self.ttt_config = self.ttt_configs[0]
        self.ttt_step: TTTStep | None = None
        self.ttt: TTTRuntime | None = None
        for index, layer in enumerate(self.model.layers):  # type: ignore[attr-defined]
            attach_layer(self, index, layer)

    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load the checkpoint, then make the runtime over the model's own parameters."""
        seen, config = Recorder(weights), self.ttt_config
        loaded = super().load_weights(seen)  # type: ignore[misc]
        forms = [(each, seen.fingerprint(each)) for each in self.ttt_configs]
        device = self.model.embed_tokens.weight.device
        self.ttt = TTTRuntime(*forms[0], device, others=forms[1:])
        folder = self.ttt.options.adapter
        for form in forms:
            start = initial_adapter(*form) if folder is None else load_adapter(Path(folder), config)
            self.ttt.backend.set_start(start)
        self.ttt.backend.set_weights(decoder_weights(self, config.shape, config.chunk))
        return loaded

    def forward(
        self: Any,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """SGLang's forward, inside one step of the state runtime."""
        with forward_step(self.ttt, forward_batch) as step:
            self.ttt_step = step
            try:
                return super().forward(input_ids, positions, forward_batch, *args, **kwargs)  # type: ignore[misc]
            finally:
                self.ttt_step = None


def attach_layer(model: Any, index: int, layer: Any) -> None:
    """Add the state's part to each targeted projection of one decoder layer."""
    attention, mlp, shape = layer.self_attn, layer.mlp, model.ttt_config.shape
    q, kv, ff = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.d_ff
    parts: list[tuple[Any, list[_Cut]]] = [
        (
            attention.qkv_proj,
            [("q_proj", 0, q), ("k_proj", q, q + kv), ("v_proj", q + kv, q + 2 * kv)],
        ),
        (attention.o_proj, [("o_proj", 0, shape.d_model)]),
        (mlp.gate_up_proj, [("gate_proj", 0, ff), ("up_proj", ff, 2 * ff)]),
        (mlp.down_proj, [("down_proj", 0, shape.d_model)]),
    ]
    if hasattr(mlp, "dual_gemm"):
        mlp.dual_gemm.mode = None  # its fused kernel would pass the projections by
    for module, cuts in parts:
        mine = [cut for cut in cuts if cut[0] in model.ttt_config.targets]
        if mine:
            module.register_forward_hook(_adding(model, index, mine))


def _adding(model: Any, index: int, cuts: list[_Cut]) -> Any:
    def add_state(_module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        step = model.ttt_step
        if step is None:
            return None
        y, bias = output
        for target, first, end in cuts:
            y[:, first:end] += step.read(index, target, args[0]).to(y.dtype)
        return y, bias

    return add_state


def decoder_weights(model: Any, shape: DecoderShape, positions: int) -> DecoderWeights:
    """The parameters of a loaded SGLang model, shared; only its rotary table is copied.

    Raises SeamError for a rotary embedding that is not of the neox kind.
    """
    layers = model.model.layers
    rotary = layers[0].self_attn.rotary_emb
    if not rotary.is_neox_style:
        raise SeamError("--ttt-backend lora_delta needs neox rotary embeddings")
    return DecoderWeights(
        shape=shape,
        embed=shared(model.model.embed_tokens.weight),
        layers=tuple(_layer_weights(layer) for layer in layers),
        norm=shared(model.model.norm.weight),
        head=shared(model.lm_head.weight),
        rotary=shared(rotary.cos_sin_cache[:positions].float().clone()),
        eps=model.model.norm.variance_epsilon,
        vocab=model.config.vocab_size,
    )


def _layer_weights(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        input_norm=shared(layer.input_layernorm.weight),
        qkv=_linear(attention.qkv_proj),
        o=_linear(attention.o_proj),
        post_norm=shared(layer.post_attention_layernorm.weight),
        gate_up=_linear(mlp.gate_up_proj),
        down=_linear(mlp.down_proj),
        q_norm=shared(attention.q_norm.weight) if hasattr(attention, "q_norm") else None,
        k_norm=shared(attention.k_norm.weight) if hasattr(attention, "k_norm") else None,
    )


def _linear(module: Any) -> Linear:
    bias = getattr(module, "bias", None)
    return Linear(shared(module.weight), None if bias is None else shared(bias))
