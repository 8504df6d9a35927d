"""What the hebbian recipe needs to know of a model, measured by running it on a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .checkpoint import Checkpoint
from .eager import EagerModel
from .hebbian import HebbianRecipe, logit_push, token_shares

WINDOW = 512  # tokens of one forward pass; each begins with an empty context
COUNT = 3  # layers that are picked
SINK_LIMIT = 2.0  # |h|^2 of a first row, and
PEAK_LIMIT = 10.0  # of any other row, over the mean of a layer that is picked


@dataclass(frozen=True)
class LayerStats:
    """Rows h of one layer's MLP over a text. First rows (attention sinks) are no part of means."""

    layer: int
    kappa: float  # 1 / mean |h|^2
    sink: float  # mean |h|^2 of the first rows, over the mean
    peak: float  # largest |h|^2 of another row, over the mean

    @property
    def is_quiet(self) -> bool:
        """Whether no row would drown the associations of all others."""
        return self.sink <= SINK_LIMIT and self.peak <= PEAK_LIMIT


@dataclass(frozen=True)
class Measured:
    """A model on a text."""

    layers: tuple[LayerStats, ...]  # all of the model, in order
    rms: float  # of the residual stream in front of the last norm, first rows left out
    tokens: int


def windows_of(ids: Sequence[int], prefix: Sequence[int], size: int) -> list[list[int]]:
    """The text in pieces of at most `size` tokens, each behind `prefix`; short ends are dropped."""
    step = size - len(prefix)
    pieces = [[*prefix, *ids[at : at + step]] for at in range(0, len(ids), step)]
    return [piece for piece in pieces if len(piece) >= min(size, len(prefix) + 16)] or pieces[:1]


def measure(
    model: EagerModel, windows: Sequence[Sequence[int]], tick: Callable[[], None]
) -> Measured:
    """Run the windows; `tick` is called after each. Raises ValueError for numbers not finite."""
    squares: list[list[Tensor]] = [[] for _ in range(model.depth)]
    rms: list[Tensor] = []
    for window in windows:
        observed, residual = model.observe(window)
        rms.append(residual[1:])
        for layer, rows in enumerate(observed):
            squares[layer].append(rows)
        tick()
    layers = tuple(_stats(layer, rows) for layer, rows in enumerate(squares))
    return Measured(layers, float(torch.cat(rms).mean()), sum(map(len, windows)))


def _stats(layer: int, rows: Sequence[Tensor]) -> LayerStats:
    first = torch.stack([each[0] for each in rows])
    rest = torch.cat([each[1:] for each in rows])
    if not len(rest) or not torch.isfinite(rest).all() or not rest.mean() > 0:
        raise ValueError(f"layer {layer}: |h|^2 of the text is not a finite positive number")
    mean = rest.mean()
    return LayerStats(layer, float(1 / mean), float(first.mean() / mean), float(rest.max() / mean))


def pick_layers(stats: Sequence[LayerStats], count: int = COUNT) -> tuple[int, ...]:
    """The deepest `count` layers without a sink (fewer if there are fewer), ascending.

    Raises ValueError when there is none.
    """
    quiet = [each.layer for each in stats if each.is_quiet]
    if not quiet:
        raise ValueError(
            f"every layer has rows far larger than its mean (sinks above {SINK_LIMIT:g}, others "
            f"above {PEAK_LIMIT:g} times): name the layers yourself"
        )
    return tuple(quiet[-count:])


def fitted_recipe(
    checkpoint: Checkpoint,
    found: Measured,
    token_ids: Sequence[int],
    layers: Sequence[int] | None = None,
) -> HebbianRecipe:
    """The recipe with this model's layers, kappa, rate and gain.

    The gain is such that one association moves its token's logit as far as it does in the model
    that the recipe was made on.
    """
    base = HebbianRecipe()
    chosen = tuple(layers) if layers else pick_layers(found.layers)
    if not set(chosen) <= set(range(len(found.layers))):
        raise ValueError(
            f"layers {list(chosen)} are not among the model's 0 to {len(found.layers) - 1}"
        )
    kappa = tuple(found.layers[n].kappa for n in chosen)
    weights = checkpoint.weights
    embedding = weights["model.embed_tokens.weight"]
    head = embedding if checkpoint.config["tie_word_embeddings"] else weights["lm_head.weight"]
    shares = token_shares(token_ids, len(embedding), base)
    push = logit_push(embedding, weights["model.norm.weight"], shares, base, head) / found.rms
    if not push > 0:
        raise ValueError("the embeddings do not predict the head: name a gain yourself")
    gain = base.gain * base.logit_push / push
    return dataclasses.replace(base, layers=chosen, kappa=kappa, lr=kappa[0], gain=gain)
