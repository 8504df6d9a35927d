"""Fast weights of several streams in a decode loop: a chain of pages, or private dense weights."""

from __future__ import annotations

from itertools import count
from typing import Any, NamedTuple

import torch
from gpu_model import Model, ModelShape, state_weights
from torch import Tensor

from sgl_rwttt.backends.in_place import InPlaceBackend, InPlaceConfig
from sgl_rwttt.core import Effect, ModeSpans, SlotPool, TTTStateStore, root_id
from sgl_rwttt.kernels.boundary_update.torch_impl import boundary_update

LR = 0.01
_FEED = 512  # tokens of a prompt that one forward takes
_SPARE = 8  # pages per stream beyond those a version reads


class Setup(NamedTuple):
    """What a stream has written before the first decode step."""

    chunk: int
    prompt: int  # tokens
    tails: tuple[int, ...]  # open rows on top, per stream
    tokens: int  # that will be decoded
    dtype: torch.dtype  # of the pages


class Chain:
    """The In-Place backend and the store, as a server drives them."""

    def __init__(self, shape: ModelShape, setup: Setup, place: dict[str, Any]) -> None:
        config = InPlaceConfig(
            layers=shape.state_layers,
            chunk=setup.chunk,
            lr=LR,
            proj=True,
            target="hidden_states",
            d_model=shape.d,
            d_ff=shape.d_ff,
        )
        streams, device = len(setup.tails), place["device"]
        fold = InPlaceBackend(config, pages=1, bases=1).default_fold_pages
        written = -(-(setup.prompt + setup.tokens) // setup.chunk) + 1
        fed = -(-min(_FEED, setup.prompt) // setup.chunk)
        pages = 1 + streams * (min(fold + fed, written) + _SPARE)
        bases = 1 + streams * (2 + fed // fold) if written >= fold else 1
        self.backend = InPlaceBackend(config, pages, bases, device, setup.dtype)
        for slot in range(len(shape.state_layers)):
            conv = torch.randn(shape.d, 1, 5, device=device)
            proj = torch.randn(shape.d, shape.d, device=device) * shape.d**-0.5
            self.backend.set_weights(slot, conv, proj)
        root = root_id("benchmark", config.rule)
        self.store = TTTStateStore(
            pages=SlotPool(pages, "delta page"),
            bases=SlotPool(bases, "dense base"),
            chunk=setup.chunk,
            fold_pages=fold,
            root=root,
            copy_rows=self.backend.copy_rows,
        )
        self._fresh = count()  # ids are never used twice, so no block is adopted
        nothing = ModeSpans(0)
        match = self.store.match(root, [], nothing, 0)
        self.states = [
            self.store.create("benchmark", f"stream-{i}", match, root, [], nothing)
            for i in range(streams)
        ]
        for state, tail in zip(self.states, setup.tails, strict=True):
            left = setup.prompt + tail
            while left:
                self._feed(state, min(_FEED, left), shape)
                left -= min(_FEED, left)

    def begin(self, streams: range) -> None:
        """Plan one token of each stream."""
        self.candidates = [
            self.store.begin_write(self.states[i], [next(self._fresh)], Effect.WRITE, row)
            for row, i in enumerate(streams)
        ]
        self.plan = self.backend.begin_step([c.segment for c in self.candidates])

    def down(self, slot: int, h: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """W_0 h, shared, and each stream's own part."""
        part = self.backend.layer_step(self.plan, slot, h, target)
        return (h @ weight.T).add_(part)

    def finish(self) -> None:
        """Write the blocks that are complete, and commit every stream."""
        if not all(self.backend.finish_step(self.plan)):
            raise RuntimeError("a write of the benchmark was not finite")
        for index, candidate in enumerate(self.candidates):
            for page in self.plan.written_pages(index):
                candidate.mark_written(page)
            self.store.commit(candidate)

    def _feed(self, state: Any, tokens: int, shape: ModelShape) -> None:
        """A part of a stream's prompt, with random activations."""
        device = self.backend.device
        fresh = [next(self._fresh) for _ in range(tokens)]
        self.candidates = [self.store.begin_write(state, fresh, Effect.WRITE, 0)]
        self.plan = self.backend.begin_step([self.candidates[0].segment])
        for slot in range(len(shape.state_layers)):
            h = torch.randn(tokens, shape.d_ff, device=device) * shape.d_ff**-0.5
            target = torch.randn(tokens, shape.d, device=device) * shape.d**-0.5
            self.backend.layer_step(self.plan, slot, h, target)
        self.finish()


class Private:
    """A dense weight matrix per stream and state layer, in the model's dtype, with torch alone."""

    def __init__(self, model: Model, setup: Setup, place: dict[str, Any]) -> None:
        shape, streams = model.shape, len(setup.tails)
        depth, rows = len(shape.state_layers), (streams, setup.chunk)
        self.setup, self.rows = setup, list(setup.tails)
        self.W = torch.stack([w.expand(streams, -1, -1) for w in state_weights(model)])
        self.H = torch.zeros(depth, *rows, shape.d_ff, **place).normal_(std=shape.d_ff**-0.5)
        self.T = torch.zeros(depth, *rows, shape.d, **place).normal_(std=shape.d**-0.5)
        self.conv = torch.randn(depth, shape.d, 5, **place)
        self.proj = torch.empty(depth, shape.d, shape.d, **place).normal_(std=shape.d**-0.5)

    def begin(self, streams: range) -> None:
        """One token of each stream."""
        device = self.W.device
        self.streams = streams
        self.at = torch.tensor(list(streams), device=device)
        self.row = torch.tensor([self.rows[i] for i in streams], device=device)

    def down(self, slot: int, h: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        """Each stream's own product; ``weight`` is not needed any more."""
        self.H[slot].index_put_((self.at, self.row), h)
        self.T[slot].index_put_((self.at, self.row), target)
        first, end = self.streams.start, self.streams.stop
        return torch.bmm(h[:, None], self.W[slot, first:end].transpose(1, 2))[:, 0]

    def finish(self) -> None:
        """W += V^T H for every stream whose chunk is complete."""
        for i in self.streams:
            self.rows[i] += 1
        full = [i for i in self.streams if self.rows[i] == self.setup.chunk]
        if not full:
            return
        for slot in range(self.W.shape[0]):
            T = self.T[slot, full]
            V = boundary_update(T, self.conv[slot], self.proj[slot], LR)
            if len(full) == self.W.shape[1]:
                self.W[slot].baddbmm_(V.transpose(1, 2), self.H[slot])
                continue
            for index, i in enumerate(full):
                self.W[slot, i].addmm_(V[index].T, self.H[slot, i])
        for i in full:
            self.rows[i] = 0
