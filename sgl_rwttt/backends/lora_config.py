"""The parameters of the LoRA delta rule and the sizes of the model that it runs on, validated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DEFAULT_TARGETS = ("q_proj", "v_proj")
CLIP_NORM = 1.0
_MISSING = object()


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a llama- or qwen3-architecture decoder."""

    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int

    @classmethod
    def from_hf(cls, hf_config: Any) -> DecoderShape:
        """Read a Hugging Face configuration (object or mapping); ValueError naming the key."""
        if _get(hf_config, "hidden_act") != "silu":
            _refuse(hf_config, "hidden_act", "'silu'")
        if _get(hf_config, "use_sliding_window") is True:
            _refuse(hf_config, "use_sliding_window", "false")
        d_model = _positive(hf_config, "hidden_size")
        heads = _positive(hf_config, "num_attention_heads")
        given = {key: _get(hf_config, key) for key in ("head_dim", "num_key_value_heads")}
        absent = {key for key, value in given.items() if value in (None, _MISSING)}
        kv = "num_key_value_heads"
        shape = cls(
            layers=_positive(hf_config, "num_hidden_layers"),
            d_model=d_model,
            heads=heads,
            kv_heads=heads if kv in absent else _positive(hf_config, kv),
            head_dim=d_model // heads if "head_dim" in absent else _positive(hf_config, "head_dim"),
            d_ff=_positive(hf_config, "intermediate_size"),
        )
        if shape.heads % shape.kv_heads:
            _refuse(hf_config, kv, f"a divisor of num_attention_heads ({heads})")
        return shape

    def widths(self, target: str) -> tuple[int, int]:
        """(d_in, d_out) of one projection."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        d, ff = self.d_model, self.d_ff
        return {
            "q_proj": (d, q),
            "k_proj": (d, kv),
            "v_proj": (d, kv),
            "o_proj": (q, d),
            "gate_proj": (d, ff),
            "up_proj": (d, ff),
            "down_proj": (ff, d),
        }[target]


@dataclass(frozen=True, slots=True)
class LoraDeltaConfig:
    """The rule's parameters. Source: TLM (Hu et al. 2025), in its online form.

    Raises ValueError naming the parameter. `seed` and `initial` choose the adapter that every
    owner starts from; they belong to the rule because every later state depends on it.
    """

    shape: DecoderShape
    targets: tuple[str, ...] = DEFAULT_TARGETS
    rank: int = 8
    alpha: float = 16.0
    chunk: int = 64  # C, write-mode tokens of a segment
    lr: float = 5e-5
    tau: float = 3.0  # a segment whose loss is not above it is not learnt from
    weight: float = 0.1  # lambda of the selection weight
    steps: int = 1  # AdamW steps per boundary
    seed: int = 0  # of the A that owners start from
    initial: str = field(default="", kw_only=True)  # digest of an adapter given instead

    def __post_init__(self) -> None:
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets or len(set(self.targets)) != len(self.targets):
            _refuse_value("targets", list(self.targets), f"distinct ones of {list(TARGETS)}")
        object.__setattr__(self, "targets", tuple(sorted(self.targets, key=TARGETS.index)))
        for name, least in (("rank", 1), ("chunk", 2), ("steps", 1)):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                _refuse_value(name, value, f"an integer >= {least}")
        for name in ("alpha", "lr", "weight"):
            value = getattr(self, name)
            if not _is_real(value) or value <= 0:
                _refuse_value(name, value, "a finite number > 0")
        if not _is_real(self.tau):
            _refuse_value("tau", self.tau, "a finite number")
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            _refuse_value("seed", self.seed, "an integer from 0 to 2**63 - 1")

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers with an adapter: all of them."""
        return tuple(range(self.shape.layers))

    @property
    def scale(self) -> float:
        """alpha / rank: what (A x) B is multiplied with."""
        return self.alpha / self.rank

    @property
    def rule(self) -> str:
        """The rule as one line of text: equal text, equal state for equal tokens and weights."""
        start = f"initial={self.initial}" if self.initial else f"seed={self.seed}"
        return (
            f"lora_delta targets={','.join(self.targets)} rank={self.rank} "
            f"alpha={float(self.alpha)!r} chunk={self.chunk} lr={float(self.lr)!r} "
            f"tau={float(self.tau)!r} lambda={float(self.weight)!r} steps={self.steps} "
            f"clip={CLIP_NORM!r} {start}"
        )

    @property
    def adapter_numbers(self) -> int:
        """Numbers of one owner's A and B, all layers and targets."""
        widths = [self.shape.widths(target) for target in self.targets]
        return self.shape.layers * self.rank * sum(d_in + d_out for d_in, d_out in widths)


def _get(config: Any, key: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(key, _MISSING)
    return getattr(config, key, _MISSING)


def _refuse(config: Any, key: str, allowed: str) -> NoReturn:
    value = _get(config, key)
    shown = "is missing" if value is _MISSING else f"is {value!r}"
    raise ValueError(f"model configuration: {key} {shown}; allowed: {allowed}")


def _refuse_value(name: str, value: Any, allowed: str) -> NoReturn:
    raise ValueError(f"lora_delta: {name} is {value!r}; allowed: {allowed}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return (_is_int(value) or isinstance(value, float)) and math.isfinite(value)


def _positive(config: Any, key: str) -> int:
    value = _get(config, key)
    if not _is_int(value) or value < 1:
        _refuse(config, key, "an integer >= 1")
    return int(value)
