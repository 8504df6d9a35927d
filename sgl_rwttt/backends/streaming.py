"""TTT-Linear (TailBufferState): a linear learner per layer and head, one step per mini-batch.

Version: W [f, f] and b [f] of every layer and head at a mini-batch's start. Tail: the rows (k_j,
y_j = lambda_j g_j) of the open mini-batch, from which the gradient accumulators of the paper follow
(G_i = sum_j k_j^T y_j), and the inputs of the short convolutions. Both have a constant size.

A WRITE token at offset i sees W_0 - tau_i G_i, its own gradient included, and leaves its row. A
READ token is answered exactly as if it were written next, and leaves nothing: not the row, not the
convolution input, not the offset; READ tokens do not see each other. The version moves only when a
mini-batch is complete: the token that completes it is answered under the version before, with the
provisional state that becomes the next one. Source: Sun et al. 2025, ttt-lm-pytorch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.backends.in_place_plan import Block
from sgl_rwttt.backends.memory import sizes
from sgl_rwttt.backends.streaming_config import StreamingConfig
from sgl_rwttt.backends.streaming_plan import Round, StreamingPlan, Versions, plan_streaming
from sgl_rwttt.backends.streaming_pools import StreamingPools
from sgl_rwttt.core.faults import reach
from sgl_rwttt.kernels.ttt_linear.torch_impl import mini_batch, next_state

if TYPE_CHECKING:
    from sgl_rwttt.core.segment import BlockPart, Segment

__all__ = ["LearnerWeights", "StreamingBackend", "StreamingConfig"]

_log = logging.getLogger(__name__)

Completed = tuple[Block, "BlockPart"]


class LearnerWeights(NamedTuple):
    """What one layer's inner learner takes from the checkpoint."""

    W: Tensor  # [heads, f, f], the state before any token
    b: Tensor  # [heads, 1, f]
    gamma: Tensor  # [heads, f]
    beta: Tensor  # [heads, f]
    token_index: Tensor  # [C], learnt part of tau


class StreamingBackend(StreamingPools):
    """The rule's READ and WRITE over its pools."""

    name = "streaming"
    stateless = False  # without a state a token would see nothing before it

    def __init__(
        self, config: StreamingConfig, pages: int, bases: int, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate the pools; ``set_weights`` has to follow for every layer."""
        super().__init__(config, pages, bases, device)
        self.write_group: int | None = None  # largest batch of next states; None = the step's
        shape = (len(config.layers), config.heads, config.head_dim)
        with torch.inference_mode(False):
            self._gamma = torch.ones(shape, device=self.device)
            self._beta = torch.zeros(shape, device=self.device)
            self._tau = torch.zeros(len(config.layers), config.chunk, device=self.device)
        self._ready: set[int] = set()

    def report(self) -> dict[str, Any]:
        """Sizes and rule, plain values for a status page."""
        return {**sizes(self), "layers": list(self.config.layers)}

    @torch.no_grad()
    def set_weights(self, slot: int, weights: LearnerWeights) -> None:
        """Take the checkpoint's learner of layer slot ``slot``; kept in float32.

        Raises ValueError when a shape does not fit.
        """
        c = self.config
        self._check_slot(slot)
        heads = (c.heads, c.head_dim)
        shapes = ((*heads, c.head_dim), (c.heads, 1, c.head_dim), heads, heads, (c.chunk,))
        for name, value, shape in zip(weights._fields, weights, shapes, strict=True):
            if tuple(value.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, not {shape}")
        self.W[slot, 0], self.b[slot, 0] = weights.W, weights.b[:, 0]
        self._gamma[slot], self._beta[slot] = weights.gamma, weights.beta
        count = torch.arange(1, c.chunk + 1, device=self.device)
        learnt = weights.token_index.to(self.device, torch.float32)
        self._tau[slot] = (1.0 / count + learnt).clamp_min(0.0)
        self._ready.add(slot)

    def begin_step(self, segments: Sequence[Segment]) -> StreamingPlan:
        """Plan one forward; changes no state.

        Raises ValueError on segments that would write each other's pages or outside them,
        RuntimeError while a layer has no weights.
        """
        missing = set(range(len(self.config.layers))) - self._ready
        if missing:
            raise RuntimeError(f"layer slots {sorted(missing)} have no weights")
        memory = [
            self.memory_rows(s.parts[0].page, s.parts[0].row, s.base, s.pages) for s in segments
        ]
        return plan_streaming(tuple(segments), memory, self.pages, self.config.chunk, self.device)

    @torch.no_grad()
    def recent(self, plan: StreamingPlan, slot: int, which: int, x: Tensor) -> Tensor:
        """The last M inputs of a short convolution and its present one, oldest first.

        x [N, d] are the inputs of convolution ``which`` of the layer. Returns
        [N, M + 1, d] float32; zeros before a context's start and for rows of no segment. The inputs
        of WRITE tokens become part of the tail. Raises RuntimeError after ``layer_step``.
        """
        self._check_open(plan, slot)
        d, m = self.config.d_model, self.config.memory
        x = x.float()
        pool = self.X[slot, :, which * d : (which + 1) * d]
        source = torch.cat([pool[plan.memory], x])
        found = torch.zeros(x.shape[0], m + 1, d, device=x.device)
        found[plan.order, :m] = source[plan.windows]
        found[plan.order, m] = x[plan.order]
        pool[plan.target] = x[plan.source]
        return found

    def offsets(self, plan: StreamingPlan, rows: int) -> Tensor:
        """Offset in its mini-batch of each of the batch's rows [rows]; 0 for rows of no segment."""
        found = torch.zeros(rows, dtype=torch.int64, device=self.device)
        found[plan.order] = plan.offsets
        return found

    @torch.no_grad()
    def layer_step(
        self, plan: StreamingPlan, slot: int, q: Tensor, k: Tensor, v: Tensor, rate: Tensor
    ) -> Tensor:
        """Take the new tokens of one layer and answer them: [N, heads, f] float32.

        q, k, v [N, heads, f], rotated for ``offsets``; rate [N, heads] is lambda. Mini-batches
        that are completed before their segment's end move the segment's state here, in slots that
        only the candidate knows. Rows of no segment get zeros. Raises RuntimeError when ``slot``
        ran already in this plan.
        """
        self._check_open(plan, slot)
        plan.layers_done.add(slot)
        q, k, v, rate = q.float(), k.float(), v.float(), rate.float()
        out = torch.zeros_like(q)
        self.K[slot, plan.target] = k[plan.source].flatten(1)
        W, b = self._states(slot, plan.reads)
        for turn in plan.rounds:
            inputs = [x[turn.rows].transpose(1, 2) for x in (q, k, v, rate)]
            answer, y = mini_batch(
                (inputs[0], inputs[1], inputs[2]),
                inputs[3],
                self._tau[slot][turn.offsets],
                (W, b) if turn.whole else (W[turn.segments], b[turn.segments]),
                self._tails(slot, turn),
                turn.held,
                turn.reading,
                (self._gamma[slot], self._beta[slot]),
            )
            out[turn.rows[turn.valid]] = answer.transpose(1, 2)[turn.valid]
            self.Y[slot, turn.target] = y.transpose(1, 2).flatten(2).flatten(0, 1)[turn.picks]
            if len(turn.closing):
                self._close(slot, turn, W, b)
        return out

    @torch.no_grad()
    def finish_step(self, plan: StreamingPlan) -> list[bool]:
        """Make the states of the deferred mini-batches; per segment, whether it may be committed.

        False: some state or row of that segment is not finite, or computing it failed twice (in
        the batch, then alone). Its tail is intact. The others' bits do not depend on it. Raises
        RuntimeError when not every layer ran, or on a second call.
        """
        missing = set(range(len(self.config.layers))) - plan.layers_done
        if missing or plan.finished:
            reason = f"layer slots {sorted(missing)} did not run" if missing else "it ran already"
            raise RuntimeError(f"cannot finish the step: {reason}")
        plan.finished = True
        inner = [item for item in plan.blocks if not item[1].deferred]
        finite = self._finite(inner)
        failed = {b.segment for (b, _), ok in zip(inner, finite, strict=True) if not ok}
        deferred = [i for i in plan.blocks if i[1].deferred and i[0].segment not in failed]
        failed |= {b.segment for b, _ in set(deferred) - self._write_deferred(plan, deferred)}
        plan.written.update(b for b, _ in plan.blocks if b.segment not in failed)
        return [index not in failed for index in range(len(plan.segments))]

    def _tails(self, slot: int, turn: Round) -> tuple[Tensor, Tensor]:
        """Rows k and y of the round's open pages, [G, heads, C, f] each (C = 0 if none is held)."""
        if turn.empty:
            c = self.config
            nothing = self.K.new_zeros(len(turn.pages), c.heads, 0, c.head_dim)
            return nothing, nothing
        return self._page_rows_of(self.K[slot], turn.pages), self._page_rows_of(
            self.Y[slot], turn.pages
        )

    def _page_rows_of(self, pool: Tensor, pages: Tensor) -> Tensor:
        c = self.config
        shaped = pool.view(self.pages, c.chunk, c.heads, c.head_dim)
        return shaped[pages].transpose(1, 2)

    def _close(self, slot: int, turn: Round, W: Tensor, b: Tensor) -> None:
        """Move the states of the segments whose mini-batch this round completed (W, b)."""
        pages, owners = turn.pages[turn.closing], turn.segments[turn.closing]
        moved = self._next(slot, W[owners], b[owners], pages)
        W[owners], b[owners] = moved
        for place, base in turn.folds:
            self._store(slot, base, int(pages[place]), moved[0][place], moved[1][place])

    def _store(self, slot: int, base: int, page: int, W: Tensor, b: Tensor) -> None:
        """Fill a base with a state and the convolution inputs at the end of its last page."""
        self.W[slot, base], self.b[slot, base] = W, b
        if self.config.memory:
            end = (page + 1) * self.config.chunk
            self.X[slot, self._base_rows(base)] = self.X[slot, end - self.config.memory : end]

    def _next(self, slot: int, W: Tensor, b: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
        tail_k = self._page_rows_of(self.K[slot], pages)
        tail_y = self._page_rows_of(self.Y[slot], pages)
        return next_state(W, b, tail_k, tail_y, float(self._tau[slot, -1]))

    def _states(self, slot: int, versions: Versions) -> tuple[Tensor, Tensor]:
        """W [S, heads, f, f] and b [S, heads, f] of some versions, new tensors."""
        W, b = self.W[slot, versions.bases], self.b[slot, versions.bases]
        for at, pages in versions.chains:
            W[at], b[at] = self._next(slot, W[at], b[at], pages)
        return W, b

    def state(self, base: int | None, pages: tuple[int, ...], slot: int) -> tuple[Tensor, Tensor]:
        """W [heads, f, f] and b [heads, f] of a version at a layer slot, new tensors."""
        W, b = self._states(slot, Versions.of([(base, pages)], self.device))
        return W[0], b[0]

    def _finite(self, items: Sequence[Completed]) -> list[bool]:
        """Per completed mini-batch, whether its rows and its base are finite in all layers."""
        if not items:
            return []
        rows = self._page_rows([block.page for block, _ in items])
        good = torch.ones(len(items), dtype=torch.bool, device=self.device)
        for pool in (self.K, self.Y, self.X):
            found = pool[:, rows].reshape(len(pool), len(items), -1)
            good &= found.isfinite().all(2).all(0)
        folded = [i for i, (_, part) in enumerate(items) if part.fold_base is not None]
        if folded:
            bases = torch.tensor([items[i][1].fold_base for i in folded], device=self.device)
            at = torch.tensor(folded, device=self.device)
            good[at] &= self.W[:, bases].isfinite().flatten(2).all(2).all(0)
            good[at] &= self.b[:, bases].isfinite().flatten(2).all(2).all(0)
        return [bool(ok) for ok in good.tolist()]

    def _write_deferred(self, plan: StreamingPlan, items: Sequence[Completed]) -> set[Completed]:
        """Write the states of ``items`` in groups, then each failing one alone; those written."""
        size = self.write_group or max(1, len(items))
        written: set[Completed] = set()
        raised: RuntimeError | None = None
        for first in range(0, len(items), size):
            try:
                written |= self._write_group(items[first : first + size])
            except RuntimeError as error:
                raised = error
        again = [item for item in items if item not in written]
        if again:
            plan.retried += len(again)
            reason = "not finite" if raised is None else repr(raised)
            _log.warning("ttt_write_retried blocks=%d reason=%s", len(again), reason)
        for item in again:
            try:
                written |= self._write_group([item])
            except RuntimeError as error:
                plan.failed[item[0].segment] = repr(error)
        return written

    def _write_group(self, items: Sequence[Completed]) -> set[Completed]:
        """Fill the bases of ``items``; those that are finite in all layers."""
        pages = [block.page for block, _ in items]
        reach("write.batch", pages=pages)
        folded = [(b.page, p.fold_base, p.fold_from) for b, p in items if p.fold_base is not None]
        reads = Versions.of([source for _, _, source in folded], self.device)
        for slot in range(len(self.config.layers)) if folded else ():
            W, b = self._states(slot, reads)
            for index, (page, base, _) in enumerate(folded):
                if slot == 0:
                    reach("write.candidate", values=W.flatten(1, 2), index=index, page=page)
                self._store(slot, base, page, W[index], b[index])
        finite = self._finite(items)
        return {item for item, ok in zip(items, finite, strict=True) if ok}

    def _check_open(self, plan: StreamingPlan, slot: int) -> None:
        self._check_slot(slot)
        if slot in plan.layers_done or plan.finished:
            raise RuntimeError(f"layer slot {slot} ran twice in one step")

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self.config.layers):
            raise ValueError(f"layer slot {slot}; there are {len(self.config.layers)}")
