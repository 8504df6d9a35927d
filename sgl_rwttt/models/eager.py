"""A checkpoint run by transformers on the CPU, with In-Place TTT as published, one text at a time.

What the recipe measures with and what a conversion is judged by; nothing is served with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sgl_rwttt.backends.in_place_config import InPlaceConfig
from sgl_rwttt.kernels.boundary_update.torch_impl import boundary_update

from .checkpoint import Checkpoint
from .hf_folder import ARCHITECTURES


class EagerModel:
    """Shares the tensors of a ``Checkpoint``; `write` works on copies until `reset`.

    Raises ValueError for tensors that are missing, unknown or of another shape.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.model = _build(checkpoint)
        self._fast: dict[int, Tensor] = {}  # layer -> its weight before `write`

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        return len(self.model.model.layers)

    @property
    def context(self) -> int:
        """Longest context, tokens."""
        return int(self.model.config.max_position_embeddings)

    @torch.no_grad()
    def observe(self, ids: Sequence[int]) -> tuple[list[Tensor], Tensor]:
        """(|h|^2 [tokens] of each layer's MLP, rms [tokens] of the last residual stream)."""
        tokens = torch.tensor([list(ids)])
        with self._seen(range(self.depth)) as hidden:
            residual: list[Tensor] = []
            hook = self.model.model.norm.register_forward_pre_hook(
                lambda _module, inputs: residual.append(inputs[0][0])
            )
            try:
                self.model.model(tokens, use_cache=False)
            finally:
                hook.remove()
        squares = [hidden[layer].double().square().sum(1) for layer in range(self.depth)]
        return squares, residual[0].double().square().mean(1).sqrt()

    @torch.no_grad()
    def loss(self, ids: Sequence[int]) -> float:
        """Mean nats per token of a text in an empty context, the first token left out."""
        logits = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return float(cross_entropy(logits[:-1], torch.tensor(list(ids[1:]))))

    @torch.no_grad()
    def write(self, ids: Sequence[int]) -> None:
        """Read the complete chunks of a text in one context, updating the fast weights after each.

        The checkpoint must have its TTT tensors and ``ttt_target: input_embed``.
        """
        rule = InPlaceConfig.from_hf(self._checkpoint.config)
        past = None
        for start in range(0, len(ids) - rule.chunk + 1, rule.chunk):
            tokens = torch.tensor([list(ids[start : start + rule.chunk])])
            with self._seen(rule.layers) as hidden:
                out = self.model.model(tokens, past_key_values=past, use_cache=True)
            past = out.past_key_values
            target = self.model.model.embed_tokens(tokens)
            for layer in rule.layers:
                self._update(layer, target, hidden[layer], rule.lr)

    def reset(self) -> None:
        """Back to the checkpoint's weights."""
        for layer, weight in self._fast.items():
            self._down(layer).weight.data = weight
        self._fast.clear()

    def _update(self, layer: int, target: Tensor, hidden: Tensor, lr: float) -> None:
        down = self._down(layer)
        if layer not in self._fast:
            self._fast[layer] = down.weight.data
            down.weight.data = down.weight.data.clone()
        prefix = f"model.layers.{layer}.mlp.ttt_"
        conv = self._checkpoint.weights[prefix + "conv.weight"][:, 0]
        values = boundary_update(target, conv, self._checkpoint.weights[prefix + "proj.weight"], lr)
        down.weight.data += values[0].T @ hidden

    def _down(self, layer: int) -> Any:
        return self.model.model.layers[layer].mlp.down_proj

    @contextmanager
    def _seen(self, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """The inputs [tokens, d_ff] of the layers' down projections in the next forward pass."""
        found: dict[int, Tensor] = {}

        def keep(layer: int) -> Any:
            return lambda _module, inputs: found.__setitem__(layer, inputs[0][0])

        hooks = [self._down(n).register_forward_pre_hook(keep(n)) for n in layers]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()


def _build(checkpoint: Checkpoint) -> Any:
    """The transformers model of a checkpoint's own tensors; no memory is taken for others."""
    import transformers

    name = checkpoint.config["architectures"][0]
    assert name in ARCHITECTURES
    model_class = getattr(transformers, name)
    try:
        config = model_class.config_class.from_dict(checkpoint.config)
        with torch.device("meta"):
            model = model_class(config)
    except Exception as error:  # of many kinds, whatever the key
        raise ValueError(f"config.json is not one of a {name}: {error}") from error
    weights = {name: t for name, t in checkpoint.weights.items() if ".ttt_" not in name}
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ValueError(f"the weights do not fit config.json: {str(error)[:500]}") from error
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(config)  # its buffer is computed, not loaded
    return model.eval()
