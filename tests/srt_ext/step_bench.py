"""Owners of a real runtime, step, store and backend, and forward passes without SGLang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sgl_rwttt.backends.in_place_config import InPlaceConfig
from sgl_rwttt.core import faults
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.srt_ext.launch import prepare_environment
from sgl_rwttt.srt_ext.lineage import RequestLineage
from sgl_rwttt.srt_ext.runtime import TTTRuntime
from sgl_rwttt.srt_ext.step import forward_step

C = 4
VOCAB = 40
OWNERS = 4
CONFIG = InPlaceConfig((0, 1), C, 0.05, True, "hidden_states", 16, 32)
PREFILLS = [2 * C + 3, C + 3, 3 * C + 3, C - 1]  # everybody is one token before a boundary


class Bench:
    """Owners of one runtime, and forward passes over all of them."""

    def __init__(self) -> None:
        prepare_environment()
        self.runtime = TTTRuntime(CONFIG, "bench", torch.device("cpu"))
        g = torch.Generator().manual_seed(0)
        self.h = torch.randn(2, VOCAB, 32, generator=g)
        self.x = torch.randn(2, VOCAB, 16, generator=g)
        for slot in range(2):
            weights = torch.randn(16, 1, 5, generator=g), torch.randn(16, 16, generator=g)
            self.runtime.backend.set_weights(slot, *weights)
        self.owners = [self.admit(f"o{i}", PREFILLS[i]) for i in range(OWNERS)]
        self.lengths = [0] * OWNERS

    def admit(self, name: str, prompt: int) -> RequestLineage:
        """A request that got its pool row."""
        root = self.runtime.default_root
        spans = ModeSpans(prompt)
        lineage = RequestLineage(
            owner=name, branch=name, root=root, spans=spans, mode=Effect.WRITE, chunk=C
        )
        store = self.runtime.store
        match = store.match(root.id, [0], ModeSpans(1), 0)
        lineage.state = store.create(name, name, match, root.id, [], ModeSpans())
        index = int(name[1:])
        tokens = [(7 * index + 3 * k) % VOCAB for k in range(prompt + 64)]
        lineage.req = SimpleNamespace(origin_input_ids=tokens[:prompt], output_ids=tokens[prompt:])
        self.runtime.bind(len(self.runtime.rows) + 1, lineage)
        return lineage

    def forward(self, counts: Sequence[int], rows: Sequence[int] | None = None) -> list[Tensor]:
        """One forward pass; owner i brings `counts[i]` tokens. The answers of each [2, n, d]."""
        ids = [
            (7 * i + 3 * k) % VOCAB
            for i in range(OWNERS)
            for k in range(self.lengths[i], self.lengths[i] + counts[i])
        ]
        batch = SimpleNamespace(
            rids=[f"o{row - 1}" for row in rows or range(1, OWNERS + 1)],
            forward_mode=SimpleNamespace(is_idle=lambda: False, is_decode=lambda: False),
            extend_seq_lens_cpu=list(counts),
            extend_prefix_lens_cpu=list(self.lengths),
        )
        with forward_step(self.runtime, batch) as step:
            assert step is not None
            out = torch.stack([step.layer(s, self.h[s, ids], self.x[s, ids]) for s in (0, 1)])
        self.lengths = [a + b for a, b in zip(self.lengths, counts, strict=True)]
        return list(out.split(list(counts), dim=1))

    def content(self, index: int) -> tuple[Any, ...]:
        """State id, version number and the pages' bytes of one owner."""
        state = self.owners[index].require_state()
        held = self.runtime.backend.export(state.version)
        tail = b""
        if state.tail is not None:
            h, t = self.runtime.backend.tail(state.tail.page, state.tail.rows, 0)
            tail = h.numpy().tobytes() + t.numpy().tobytes()
        content = {name: rows.numpy().tobytes() for name, rows in held.items()}
        return state.clock.state_id, state.version.number, content, tail

    def page_of(self, index: int) -> Callable[[faults.Context], bool]:
        """Whether a fault point concerns a block of one owner."""

        def when(context: faults.Context) -> bool:
            candidate = self.owners[index].require_state().candidate
            wanted = set(context.get("pages") or [context["page"]])
            return candidate is not None and any(b.page in wanted for b in candidate.blocks)

        return when

    def end(self) -> None:
        """Everybody leaves; nothing may be left."""
        store = self.runtime.store
        for lineage in self.owners:
            store.release(lineage.require_state(), keep_tail=lineage.error is None)
        self.runtime.check_integrity()
        store.flush()
        assert store.stats()["pages_live"] == store.stats()["bases_live"] == 0
