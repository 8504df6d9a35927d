"""The backends of this package, and the toy rule of the examples, as cases of the suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sgl_rwttt.backends.in_place import InPlaceBackend
from sgl_rwttt.backends.lora_config import DecoderShape, LoraDeltaConfig
from sgl_rwttt.backends.lora_delta import LoraDeltaBackend
from sgl_rwttt.backends.lora_slots import initial_adapter
from sgl_rwttt.backends.streaming import StreamingBackend
from sgl_rwttt.backends.streaming_model import PlannedStep
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.testing.backend_conformance import Batch, Item, SlotKind
from tests import golden_streaming
from tests.backends import in_place_rig, lora_oracle, streaming_rig
from tests.backends.lora_rig import Reads, fused_weights, reading
from tests.backends.streaming_oracle import EagerTTT

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_backend"


@contextmanager
def with_nan(values: Tensor) -> Iterator[None]:
    """Within it, ``values`` (a view) are NaN."""
    kept = values.clone()
    values.fill_(torch.nan)
    yield
    values.copy_(kept)


class InPlaceCase:
    """Made-up activations; the outputs are the layers' deltas."""

    chunk, evidence, vocab, tolerance = 4, "rows", in_place_rig.VOCAB, 1e-5

    def __init__(self, fold_pages: int) -> None:
        self.fold_pages = fold_pages
        self.rig = in_place_rig.Rig(self.chunk, pages=1, bases=1)

    def make(self, pages: int, bases: int) -> InPlaceBackend:
        backend = InPlaceBackend(self.rig.config, pages, bases)
        for slot in range(len(self.rig.config.layers)):
            backend.set_weights(slot, self.rig.conv[slot], self.rig.proj[slot])
        return backend

    def forward(self, backend: InPlaceBackend, plan: Any, batch: Batch) -> Tensor:
        h, t = self.rig.h[:, batch.tokens()], self.rig.t[:, batch.tokens()]
        depth = range(len(self.rig.config.layers))
        return torch.stack([backend.layer_step(plan, i, h[i], t[i]) for i in depth], dim=1)

    def oracle(self, tokens: Sequence[int], modes: Sequence[Effect]) -> Tensor:
        return self.rig.expected(tokens, spans(modes)).transpose(0, 1)

    def poison(self, backend: InPlaceBackend, kind: SlotKind, slot: int) -> None:
        (backend.poison if kind == "page" else backend.poison_base)(slot)

    def spoil(self, backend: InPlaceBackend, token: int) -> Any:
        return with_nan(self.rig.t[1, token, :1])


class ShortBatches(golden_streaming.StreamingCase):
    """A golden checkpoint with mini-batches of a few tokens, which its first offsets serve."""

    def weights(self) -> dict[str, Tensor]:
        size = self.config["mini_batch_size"]
        found = super().weights()
        return {k: v[:size] if k.endswith("token_idx") else v for k, v in found.items()}


class StreamingCase:
    """A golden checkpoint; the outputs are its logits."""

    evidence, fold_pages, tolerance = "rows", 1, 2e-5

    def __init__(self, name: str, chunk: int) -> None:
        golden = golden_streaming.streaming_case(name)
        fields = vars(golden) | {"config": golden.config | {"mini_batch_size": chunk}}
        self.golden = ShortBatches(**fields)
        rig = streaming_rig.StreamingRig(self.golden, pages=1, bases=1)
        self.config, self.model, self.head = rig.config, rig.model.requires_grad_(False), rig.head
        self.chunk, self.vocab = self.config.chunk, self.config.vocab

    def make(self, pages: int, bases: int) -> StreamingBackend:
        backend = StreamingBackend(self.config, pages, bases)
        self.model.hand_over(backend)
        return backend

    def forward(self, backend: StreamingBackend, plan: Any, batch: Batch) -> Tensor:
        hidden = self.model(torch.tensor(batch.tokens()), PlannedStep(backend, plan))
        return hidden @ self.head.T

    def oracle(self, tokens: Sequence[int], modes: Sequence[Effect]) -> Tensor:
        eager = EagerTTT(self.golden)
        pairs = zip(tokens, modes, strict=True)
        return torch.stack([eager.step(token, mode is Effect.WRITE) for token, mode in pairs])

    def poison(self, backend: StreamingBackend, kind: SlotKind, slot: int) -> None:
        (backend.poison if kind == "page" else backend.poison_base)(slot)

    def spoil(self, backend: StreamingBackend, token: int) -> Any:
        return with_nan(self.model.embed_tokens.weight[token, :1])


class LoraCase:
    """A tiny decoder; the outputs are its logits.

    KV is a function of the lineage, as the state is: it is kept by the tokens that led to it.
    """

    chunk, evidence, vocab, fold_pages, tolerance = 5, "tokens", lora_oracle.VOCAB, 0, 5e-4
    lr, tau = 0.02, 4.4

    def __init__(self) -> None:
        self.model = lora_oracle.tiny_model("qwen3").requires_grad_(False)
        weights = fused_weights(self.model)
        self.weights = replace(weights, embed=weights.embed.clone())  # spoilt in training alone
        shape = DecoderShape.from_hf(self.model.config)
        self.config = LoraDeltaConfig(shape, chunk=self.chunk, lr=self.lr, tau=self.tau)
        self.start = initial_adapter(self.config, "tiny")
        self.kv: dict[tuple[Item, ...], list[tuple[Tensor, Tensor]]] = {}

    def make(self, pages: int, bases: int) -> LoraDeltaBackend:
        backend = LoraDeltaBackend(self.config, slots=pages, train_tokens=64)
        backend.set_weights(self.weights)
        backend.set_start(self.start)
        return backend

    def forward(self, backend: LoraDeltaBackend, plan: Any, batch: Batch) -> Tensor:
        cache, mask, positions = self._past(batch)
        ids = torch.tensor([batch.tokens()])
        with reading(self.model, backend, plan):
            answer = self.model(
                input_ids=ids,
                position_ids=positions[None],
                attention_mask=mask[None, None],
                past_key_values=cache,
                use_cache=True,
            )
        held = mask.shape[1] - batch.size
        for own in batch.rows:
            lineage = (*own.before, *own.items)
            for i in range(len(own.items)):
                at = held + own.start + i
                self.kv[lineage[: len(own.before) + i + 1]] = [
                    (layer.keys[:, :, at], layer.values[:, :, at])
                    for layer in answer.past_key_values.layers
                ]
        return answer.logits[0]

    def _past(self, batch: Batch) -> tuple[DynamicCache, Tensor, Tensor]:
        """The owners' KV side by side, who sees what [N, past + N], and the rows' positions."""
        known = [self.kv[own.before[: i + 1]] for own in batch.rows for i in range(len(own.before))]
        cache = DynamicCache()
        for layer, _ in enumerate(self.model.model.layers) if known else ():
            keys, values = zip(*(token[layer] for token in known), strict=True)
            cache.update(torch.stack(keys, 2), torch.stack(values, 2), layer)
        sees = torch.eye(batch.size, dtype=torch.bool)
        sees = torch.cat([torch.zeros(batch.size, len(known), dtype=torch.bool), sees], 1)
        positions, past = torch.zeros(batch.size, dtype=torch.int64), 0
        for own in batch.rows:
            before, count = len(own.before), len(own.items)
            rows, first = slice(own.start, own.start + count), len(known) + own.start
            sees[rows, past : past + before] = True
            sees[rows, first : first + count] = torch.ones(count, count).tril().bool()
            positions[rows] = torch.arange(before, before + count)
            past += before
        return cache, torch.where(sees, 0.0, torch.finfo(torch.float32).min), positions

    def oracle(self, tokens: Sequence[int], modes: Sequence[Effect]) -> Tensor:
        c, evidence, rows, cache = self.config, [], [], None
        owner = lora_oracle.Owner(self.model, c.targets, c.rank, c.alpha, self._adapter())
        for token, mode in zip(tokens, modes, strict=True):
            logits, cache = owner.feed(token, cache)
            rows.append(logits)
            evidence += [token] if mode is Effect.WRITE else []
            if len(evidence) == self.chunk:
                owner.boundary(evidence, self.lr, self.tau, c.weight, c.steps)
                evidence = []
        return torch.stack(rows)

    def _adapter(self) -> dict[str, Tensor]:
        return self.make(1, 1).adapter(Reads())

    def poison(self, backend: LoraDeltaBackend, kind: SlotKind, slot: int) -> None:
        if kind == "page":
            backend.poison(slot)

    def spoil(self, backend: LoraDeltaBackend, token: int) -> Any:
        return with_nan(self.weights.embed[token, :1])


def spans(modes: Sequence[Effect]) -> ModeSpans:
    found = ModeSpans()
    for mode in modes:
        found.append(1, mode)
    return found


def toy() -> ModuleType:
    """The test module of the third-party example, with the rule that lies beside it."""
    module("running_mean", EXAMPLE / "running_mean.py")
    return module("test_running_mean", EXAMPLE / "tests" / "test_running_mean.py")


def module(name: str, path: Path) -> ModuleType:
    """A module by its path, imported once."""
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = found = module_from_spec(spec)
        spec.loader.exec_module(found)
    return sys.modules[name]
