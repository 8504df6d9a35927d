"""The published configuration of an In-Place TTT checkpoint, validated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

TARGETS = ("hidden_states", "input_embed")
_MISSING = object()


@dataclass(frozen=True, slots=True)
class InPlaceConfig:
    """The rule's parameters and sizes. Source: In-Place TTT (Feng et al. 2026), config.json."""

    backend: ClassVar[str] = "in_place"
    dense_share: ClassVar[float] = 0.25  # of the memory, for dense bases

    layers: tuple[int, ...]  # decoder layers with fast weights, ascending; index = layer slot
    chunk: int  # C, write-mode tokens per update
    lr: float
    proj: bool  # V = conv(T) @ proj, or conv(T) alone
    target: Literal["hidden_states", "input_embed"]
    d_model: int
    d_ff: int

    @classmethod
    def from_hf(cls, hf_config: Any) -> InPlaceConfig:
        """Read a Hugging Face configuration (object or mapping).

        Raises ValueError with the key, its value and what is allowed, for the first key that is
        missing or does not fit.
        """
        if _get(hf_config, "ttt_mode") is not True:
            _refuse(hf_config, "ttt_mode", "true")
        if _get(hf_config, "hidden_act") != "silu":
            _refuse(hf_config, "hidden_act", "'silu'")
        if not isinstance(_get(hf_config, "ttt_proj"), bool):
            _refuse(hf_config, "ttt_proj", "true or false")
        if _get(hf_config, "ttt_target") not in TARGETS:
            _refuse(hf_config, "ttt_target", " or ".join(repr(t) for t in TARGETS))
        return cls(
            layers=_layers(hf_config),
            chunk=_positive(hf_config, "ttt_chunk"),
            lr=_rate(hf_config),
            proj=_get(hf_config, "ttt_proj"),
            target=_get(hf_config, "ttt_target"),
            d_model=_positive(hf_config, "hidden_size"),
            d_ff=_positive(hf_config, "intermediate_size"),
        )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in float32, all layers."""
        return 4 * len(self.layers) * self.chunk * (self.d_ff + self.d_model)

    @property
    def base_bytes(self) -> int:
        """Bytes of one dense base, all layers."""
        return 4 * len(self.layers) * self.d_ff * self.d_model

    @property
    def rule(self) -> str:
        """The rule as one line of text: equal text, equal state for equal tokens and weights."""
        layers = ",".join(map(str, self.layers))
        return (
            f"in_place layers={layers} chunk={self.chunk} lr={self.lr!r} "
            f"proj={int(self.proj)} target={self.target}"
        )


def _get(config: Any, key: str) -> Any:
    if isinstance(config, Mapping):
        return config.get(key, _MISSING)
    return getattr(config, key, _MISSING)


def _refuse(config: Any, key: str, allowed: str) -> NoReturn:
    value = _get(config, key)
    shown = "is missing" if value is _MISSING else f"is {value!r}"
    raise ValueError(f"model configuration: {key} {shown}; allowed: {allowed}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _positive(config: Any, key: str) -> int:
    value = _get(config, key)
    if not _is_int(value) or value < 1:
        _refuse(config, key, "an integer >= 1")
    return int(value)


def _rate(config: Any) -> float:
    value = _get(config, "ttt_lr")
    if not (_is_int(value) or isinstance(value, float)) or not math.isfinite(value):
        _refuse(config, "ttt_lr", "a finite number")
    return float(value)


def _layers(config: Any) -> tuple[int, ...]:
    depth = _positive(config, "num_hidden_layers")
    value = _get(config, "ttt_layers")
    fits = (
        isinstance(value, (list, tuple))
        and len(value) > 0
        and all(_is_int(layer) and 0 <= layer < depth for layer in value)
        and len(set(value)) == len(value)
    )
    if not fits:
        _refuse(
            config,
            "ttt_layers",
            f"a non-empty list of distinct integers from 0 to {depth - 1} (num_hidden_layers - 1)",
        )
    return tuple(sorted(value))
