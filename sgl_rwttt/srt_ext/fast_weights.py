"""Fast weights on a stock SGLang model: hooks on the TTT layers, a step around the forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from sgl_rwttt.backends.in_place import InPlaceConfig

from .checkpoint import CONV_TAPS, check_weights
from .fingerprint import Recorder
from .runtime import TTTRuntime
from .step import TTTStep, forward_step
from .weights import CheckpointError


class FastWeightCausalLM:
    """Mixed in front of a causal LM whose MLPs are ``model.layers[N].mlp`` with a ``down_proj``.

    The checkpoint must have ``ttt_mode: true``. The model owns the state runtime (``ttt``).
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if getattr(config, "ttt_mode", False) is not True:
            raise CheckpointError(f"{type(self).__name__} of sgl_rwttt needs ttt_mode: true")
        self.ttt_config = InPlaceConfig.from_hf(config)
        self.ttt_step: TTTStep | None = None
        self.ttt: TTTRuntime | None = None
        for slot, layer in enumerate(self.ttt_config.layers):
            attach_layer(self, slot, self.model.layers[layer].mlp)  # type: ignore[attr-defined]

    def load_weights(self: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Load the checkpoint, then hand the TTT tensors to the backend.

        Raises CheckpointError naming a TTT tensor that is missing, misshapen or unknown.
        """
        seen = Recorder(weights)
        loaded = super().load_weights(seen)  # type: ignore[misc]
        check_weights(seen.shapes, self.ttt_config)
        self.ttt = TTTRuntime(
            self.ttt_config,
            seen.fingerprint(self.ttt_config),
            self.model.embed_tokens.weight.device,
        )
        for slot, layer in enumerate(self.ttt_config.layers):
            mlp = self.model.layers[layer].mlp
            proj = mlp.ttt_proj.weight if self.ttt_config.proj else None
            self.ttt.backend.set_weights(slot, mlp.ttt_conv.weight, proj)
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
        embeds = self.ttt_config.target == "input_embed"
        evidence = (lambda: self.model.embed_tokens(input_ids)) if embeds else None
        with forward_step(self.ttt, forward_batch, evidence) as step:
            self.ttt_step = step
            try:
                return super().forward(input_ids, positions, forward_batch, *args, **kwargs)  # type: ignore[misc]
            finally:
                self.ttt_step = None


def attach_layer(model: Any, slot: int, mlp: nn.Module) -> None:
    """Give one MLP its TTT parameters and hooks: y = W_0 h + the state's part.

    The pre-hook keeps the MLP's input x [rows, d]; the hook on ``down_proj`` sees h [rows, d_ff]
    and adds the state's part to W_0 h [rows, d] (under tensor parallelism a partial sum).
    """
    config = model.ttt_config
    if hasattr(mlp, "dual_gemm"):
        mlp.dual_gemm.mode = None  # its fused kernel never shows down_proj its input
    mlp.ttt_conv = nn.Conv1d(
        config.d_model, config.d_model, CONV_TAPS, groups=config.d_model, bias=False
    )
    if config.proj:
        mlp.ttt_proj = nn.Linear(config.d_model, config.d_model, bias=False)
    kept: list[torch.Tensor] = []

    def keep_input(_module: nn.Module, args: tuple[Any, ...]) -> None:
        kept[:] = args[:1]

    def add_state(_module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        step = model.ttt_step
        if step is None:
            return None
        y, bias = output
        return y + step.layer(slot, args[0], kept.pop()).to(y.dtype), bias

    mlp.register_forward_pre_hook(keep_input)
    mlp.down_proj.register_forward_hook(add_state)
