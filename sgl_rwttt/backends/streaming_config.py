"""The published configuration of a TTT-Linear checkpoint, validated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

MODEL_TYPE = "ttt"
ARCHITECTURE = "TTTForCausalLM"

# The published TTTConfig's defaults, for keys that a checkpoint leaves out.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "ttt_layer_type": "linear",
    "ttt_base_lr": 1.0,
    "mini_batch_size": 16,
    "use_gate": False,
    "share_qk": False,
    "pre_conv": False,
    "conv_kernel": 4,
}


@dataclass(frozen=True, slots=True)
class StreamingConfig:
    """The rule's parameters and the model's sizes. Source: ttt-lm-pytorch, config.json."""

    backend: ClassVar[str] = "streaming"

    layers: tuple[int, ...]  # every decoder layer holds a state; index = layer slot
    chunk: int  # tokens of a mini-batch
    heads: int
    d_model: int
    d_ff: int
    vocab: int
    base_lr: float
    rope_theta: float
    rms_eps: float
    share_qk: bool  # one projection for q and k, then a short causal convolution for each
    pre_conv: bool  # a short causal convolution before the TTT layer
    gate: bool
    conv_kernel: int
    tied: bool  # the output projection is the embedding

    @classmethod
    def from_hf(cls, hf_config: Any) -> StreamingConfig:
        """Read a Hugging Face configuration (object or mapping); absent keys have their defaults.

        Raises ValueError with the key, its value and what is allowed, for the first that does not
        fit.
        """
        if _get(hf_config, "ttt_layer_type") != "linear":
            _refuse(hf_config, "ttt_layer_type", "'linear'")
        if _get(hf_config, "hidden_act") != "silu":
            _refuse(hf_config, "hidden_act", "'silu'")
        config = cls(
            layers=tuple(range(_count(hf_config, "num_hidden_layers"))),
            chunk=_count(hf_config, "mini_batch_size"),
            heads=_count(hf_config, "num_attention_heads"),
            d_model=_count(hf_config, "hidden_size"),
            d_ff=_count(hf_config, "intermediate_size"),
            vocab=_count(hf_config, "vocab_size"),
            base_lr=_number(hf_config, "ttt_base_lr"),
            rope_theta=_number(hf_config, "rope_theta"),
            rms_eps=_number(hf_config, "rms_norm_eps"),
            share_qk=_flag(hf_config, "share_qk"),
            pre_conv=_flag(hf_config, "pre_conv"),
            gate=_flag(hf_config, "use_gate"),
            conv_kernel=_count(hf_config, "conv_kernel"),
            tied=_flag(hf_config, "tie_word_embeddings"),
        )
        if config.d_model % config.heads or (config.d_model // config.heads) % 2:
            _refuse(hf_config, "num_attention_heads", "a divisor of hidden_size with an even ratio")
        if config.memory > config.chunk:
            _refuse(hf_config, "conv_kernel", f"at most mini_batch_size + 1 = {config.chunk + 1}")
        return config

    @property
    def head_dim(self) -> int:
        """f, the size of one head."""
        return self.d_model // self.heads

    @property
    def convolved(self) -> int:
        """Inputs of short convolutions per token and layer, each of size d_model."""
        return int(self.pre_conv) + int(self.share_qk)

    @property
    def memory(self) -> int:
        """Earlier tokens that the short convolutions look at; 0 without convolutions."""
        return self.conv_kernel - 1 if self.convolved else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one page: a mini-batch's rows, all layers."""
        return 4 * len(self.layers) * self.chunk * self.d_model * (2 + self.convolved)

    @property
    def base_bytes(self) -> int:
        """Bytes of one version, all layers."""
        rows = self.head_dim + 1 + self.memory * self.convolved
        return 4 * len(self.layers) * self.d_model * rows

    @property
    def dense_share(self) -> float:
        """Share of the memory for versions: as many as pages, each mini-batch ends in one."""
        return self.base_bytes / (self.base_bytes + self.page_bytes)

    @property
    def rule(self) -> str:
        """The rule as one line of text: equal text, equal state for equal tokens and weights."""
        return (
            f"streaming layers={len(self.layers)} chunk={self.chunk} lr={self.base_lr!r} "
            f"heads={self.heads} share_qk={int(self.share_qk)} pre_conv={int(self.pre_conv)} "
            f"conv={self.memory}"
        )


def _get(config: Any, key: str) -> Any:
    default = DEFAULTS[key]
    if isinstance(config, Mapping):
        return config.get(key, default)
    return getattr(config, key, default)


def _refuse(config: Any, key: str, allowed: str) -> NoReturn:
    raise ValueError(f"model configuration: {key} is {_get(config, key)!r}; allowed: {allowed}")


def _count(config: Any, key: str) -> int:
    value = _get(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(config, key, "an integer >= 1")
    return int(value)


def _number(config: Any, key: str) -> float:
    value = _get(config, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        _refuse(config, key, "a finite number")
    return float(value)


def _flag(config: Any, key: str) -> bool:
    value = _get(config, key)
    if not isinstance(value, bool):
        _refuse(config, key, "true or false")
    return bool(value)
