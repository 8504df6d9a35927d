"""In-Place TTT fast weights (FastWeightState): a chain of delta pages over shared weights.

At each state layer ``y = W_v h`` with ``W_v = W_0 + sum over committed chunks of V_c^T H_c``. A
page holds the (H, V) rows of one chunk for all layers; V already carries the learning rate. In the
open page of an owner the V rows hold the targets T until the chunk is complete. A dense base is
kept as its difference from W_0, so W_0 stays one shared product of the model's own. A token that
completes a chunk is answered with the version before it. Source: Feng et al. 2026.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sgl_rwttt.backends.in_place_config import InPlaceConfig
from sgl_rwttt.backends.in_place_plan import Block, StepPlan, plan_step, read_parts
from sgl_rwttt.backends.memory import sizes
from sgl_rwttt.backends.page_pools import PagePools, all_finite
from sgl_rwttt.core.faults import reach
from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.apply_state.plan import ReadPart, ReadPlan, plan_read

if TYPE_CHECKING:
    from sgl_rwttt.core.segment import Segment

__all__ = ["InPlaceBackend", "InPlaceConfig"]

_log = logging.getLogger(__name__)


class InPlaceBackend(PagePools):
    """The rule's READ and WRITE over its pools; implements ``base.StateBackend``."""

    name = "in_place"
    stateless = True  # a request without state is answered by the base model

    def __init__(
        self,
        config: InPlaceConfig,
        pages: int,
        bases: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate the pools (see ``PagePools``); ``set_weights`` has to follow for every layer."""
        super().__init__(config, pages, bases, device, dtype)
        self.write_group: int | None = None  # largest BoundaryUpdate batch; None = the step's
        self._weights: dict[int, tuple[Tensor, Tensor | None]] = {}
        nothing = plan_read((), config.chunk, self.device)
        self._read_cache: tuple[tuple[tuple[ReadPart, ...], ...], ReadPlan] = ((), nothing)
        kind = self.device.type
        self._apply = kernel("apply_state", kind)
        self._append = kernel("tail_append", kind)
        self._boundary = kernel("boundary_update", kind)
        self._fold = kernel("dense_update", kind)
        self._commit = kernel("selective_commit", kind)

    def report(self) -> dict[str, Any]:
        """Sizes and rule, plain values for a status page."""
        return {**sizes(self), "layers": list(self.config.layers)}

    def set_weights(self, slot: int, conv: Tensor, proj: Tensor | None) -> None:
        """Take the checkpoint's ttt_conv [d, 1, 5] and ttt_proj [d, d] of layer slot ``slot``.

        Kept in float32: a chunk's V is computed in float32 whatever the pools' dtype. Raises
        ValueError when a shape does not fit or proj is given against the configuration.
        """
        d = self.config.d_model
        self._check_slot(slot)
        if tuple(conv.shape) != (d, 1, 5):
            raise ValueError(f"ttt_conv.weight has shape {tuple(conv.shape)}, not {(d, 1, 5)}")
        if (proj is not None) != self.config.proj:
            given = "missing" if proj is None else "present"
            raise ValueError(f"ttt_proj is {self.config.proj}, but ttt_proj.weight is {given}")
        if proj is not None and tuple(proj.shape) != (d, d):
            raise ValueError(f"ttt_proj.weight has shape {tuple(proj.shape)}, not {(d, d)}")
        conv = conv.detach().reshape(d, 5).to(self.device, torch.float32)
        if proj is not None:
            proj = proj.detach().to(self.device, torch.float32)
        self._weights[slot] = (conv, proj)

    def begin_step(self, segments: Sequence[Segment]) -> StepPlan:
        """Plan one forward; changes no state.

        The read plan is kept while the same rows read the same pages, as in successive decode
        steps. Raises ValueError on segments that would write each other's pages or outside them,
        RuntimeError while a layer has no weights.
        """
        if len(self._weights) < len(self.config.layers):
            missing = set(range(len(self.config.layers))) - set(self._weights)
            raise RuntimeError(f"layer slots {sorted(missing)} have no weights")
        chunk, parts = self.config.chunk, read_parts(segments)
        if parts != self._read_cache[0]:
            self._read_cache = (parts, plan_read(parts, chunk, self.device))
        return plan_step(tuple(segments), self._read_cache[1], self.pages, chunk, self.device)

    @torch.no_grad()
    def layer_step(self, plan: StepPlan, slot: int, h: Tensor, target: Tensor) -> Tensor:
        """Append h [N, d_ff] and target [N, d], write inner blocks, read. Returns [N, d] float32.

        Chunks completed before their segment's end get their V here, in pages that only the
        candidate knows; ``finish_step`` judges them, and refuses those whose computation raised
        twice. Rows of no segment get zeros. The result is the caller's. Raises RuntimeError when
        ``slot`` ran already in this plan.
        """
        self._check_slot(slot)
        if slot in plan.layers_done or plan.finished:
            raise RuntimeError(f"layer slot {slot} ran twice in one step")
        plan.layers_done.add(slot)
        H, V, D = self.H[slot], self.V[slot], self.D[slot]
        h = h.to(self.dtype)
        self._append(h, target, H, V, plan.append)
        if plan.inner:
            self._write_inner(plan, slot)
        for fold in plan.inner_folds:
            self._fold(D, fold.src, fold.dst, fold.runs, H, V)
        out = torch.zeros(h.shape[0], self.config.d_model, device=h.device)
        self._apply(h, out, plan.read, H, V, D)
        return out

    @torch.no_grad()
    def finish_step(self, plan: StepPlan) -> list[bool]:
        """Run the BoundaryUpdate of the deferred blocks; per segment, whether it may be committed.

        False: some block of that segment is not finite, or computing it failed twice (in the
        batch, then alone). Its deferred page still holds the targets, so its tail is intact;
        blocks written inside the layers are not tried again, their targets are gone. Pages of the
        other segments are bitwise what they would be without the failing one. Raises
        RuntimeError when not every state layer ran, or on a second call.
        """
        missing = set(range(len(self.config.layers))) - plan.layers_done
        if missing or plan.finished:
            reason = f"layer slots {sorted(missing)} did not run" if missing else "it ran already"
            raise RuntimeError(f"cannot finish the step: {reason}")
        plan.finished = True
        failed = set(plan.failed) | self._failed_inner(plan.inner)
        deferred = [block for block in plan.deferred if block.segment not in failed]
        failed |= {b.segment for b in set(deferred) - self._write_deferred(plan, deferred)}
        for fold in plan.deferred_folds:
            if fold.segment not in failed:
                for H, V, D in zip(self.H, self.V, self.D, strict=True):
                    self._fold(D, fold.src, fold.dst, fold.runs, H, V)
        done = plan.inner + plan.deferred
        plan.written.update(block for block in done if block.segment not in failed)
        return [index not in failed for index in range(len(plan.segments))]

    def _failed_inner(self, blocks: Sequence[Block]) -> set[int]:
        pages = [block.page for block in blocks]
        checks = zip(self.finite(self.H, pages), self.finite(self.V, pages), strict=True)
        return {b.segment for b, ok in zip(blocks, checks, strict=True) if not all(ok)}

    def _write_inner(self, plan: StepPlan, slot: int) -> None:
        """Write V of the inner blocks of one layer; after an exception, of each one alone."""
        try:
            self._write_pages(slot, plan.inner, plan.inner_pages)
            return
        except RuntimeError as error:
            self._note_retry(plan, plan.inner, error)
        for index, block in enumerate(plan.inner):
            try:
                self._write_pages(slot, (block,), plan.inner_pages[index : index + 1])
            except RuntimeError as error:
                plan.failed[block.segment] = repr(error)

    def _write_pages(self, slot: int, blocks: Sequence[Block], pages: Tensor) -> None:
        reach("write.batch", pages=[block.page for block in blocks])
        values = self._candidate(slot, pages)
        _reach_candidates(values, blocks)
        self._write(slot, pages, values)

    def _write_deferred(self, plan: StepPlan, blocks: Sequence[Block]) -> set[Block]:
        """Write V of ``blocks`` in groups, then each failing one alone; return those written."""
        size = self.write_group or max(1, len(blocks))
        written: set[Block] = set()
        raised: RuntimeError | None = None
        for first in range(0, len(blocks), size):
            try:
                written |= self._write_group(blocks[first : first + size])
            except RuntimeError as error:
                raised = error
        again = [block for block in blocks if block not in written]
        if again:
            self._note_retry(plan, again, raised)
        for block in again:
            try:
                written |= self._write_group([block])
            except RuntimeError as error:
                plan.failed[block.segment] = repr(error)
        return written

    def _write_group(self, blocks: Sequence[Block]) -> set[Block]:
        """Compute V of ``blocks`` aside, then write it for those that are finite in all layers."""
        reach("write.batch", pages=[block.page for block in blocks])
        pages = torch.tensor([block.page for block in blocks], device=self.device)
        depth = range(len(self.config.layers))
        values = torch.stack([self._candidate(slot, pages) for slot in depth])
        _reach_candidates(values, blocks)
        h_finite = torch.tensor(self.finite(self.H, [b.page for b in blocks]), device=self.device)
        good = all_finite(values) & h_finite
        order = torch.arange(len(blocks), device=self.device)
        for slot in depth:
            self._commit(values[slot], self._by_page(self.V[slot]), order, pages, good)
        return {block for block, ok in zip(blocks, good.tolist(), strict=True) if ok}

    def _note_retry(
        self, plan: StepPlan, blocks: Sequence[Block], error: RuntimeError | None
    ) -> None:
        plan.retried += len(blocks)
        reason = "not finite" if error is None else repr(error)
        _log.warning("ttt_write_retried blocks=%d reason=%s", len(blocks), reason, exc_info=error)

    def _candidate(self, slot: int, pages: Tensor) -> Tensor:
        """V [G, C, d] float32 of complete pages, from the targets they hold."""
        conv, proj = self._weights[slot]
        targets = self._by_page(self.V[slot]).index_select(0, pages).float()
        result: Tensor = self._boundary(targets, conv, proj, self.config.lr)
        return result

    def _write(self, slot: int, pages: Tensor, values: Tensor) -> None:
        self._by_page(self.V[slot]).index_copy_(0, pages, values.to(self.dtype))

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < len(self.config.layers):
            raise ValueError(f"layer slot {slot}; there are {len(self.config.layers)}")


def _reach_candidates(values: Tensor, blocks: Sequence[Block]) -> None:
    for index, block in enumerate(blocks):
        reach("write.candidate", values=values, index=index, page=block.page)
