"""SGLang's scheduler with owners: admission, control verbs, and what happens when pages run out."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import StateCapacity, StateError
from sgl_rwttt.core.faults import reach
from sgl_rwttt.core.store import TTTStateStore

from . import admission, verbs
from .housekeeping import Housekeeping
from .lineage import RequestLineage, namespace
from .params import check_request
from .refusals import refused_weight_updates
from .report import streamer_class
from .rounds import DecodeRounds, part_of
from .runtime import TTTRuntime


def scheduler_class(base: type) -> type:
    """The subclass of SGLang's Scheduler that serves a TTT checkpoint."""
    return type("TTTScheduler", (StateScheduling, Housekeeping, base), {})


class StateScheduling:
    """The overrides; mixed in front of ``sglang.srt.managers.scheduler.Scheduler``."""

    _ttt_admitting: RequestLineage | None = None
    _ttt_starved: Any = None
    _ttt_adder: type | None = None

    @property
    def ttt(self: Any) -> TTTRuntime:
        """The state runtime of this process, held by the model."""
        runtime: TTTRuntime = self.tp_worker.model_runner.model.ttt
        return runtime

    @cached_property
    def ttt_rounds(self: Any) -> DecodeRounds:
        """The planner of this scheduler's decode steps."""
        return DecodeRounds(self.ttt, self.ttt.options)

    def get_output_streamer_class(self: Any) -> type:
        """Answers carry the state report."""
        return streamer_class(super().get_output_streamer_class())  # type: ignore[misc]

    def init_request_dispatcher(self: Any) -> None:
        """Add the control verbs, and refuse to swap the weights under living states."""
        from sglang.utils import TypeBasedDispatcher

        from .io import TTTControlReqInput

        super().init_request_dispatcher()  # type: ignore[misc]
        ours = TypeBasedDispatcher(
            [
                (TTTControlReqInput, lambda message: verbs.handle(self, message)),
                *refused_weight_updates(),
            ]
        )
        ours += self._request_dispatcher  # the first handler of a type stays
        self._request_dispatcher = ours

    # Admission

    def _handle_generate_request(self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> None:
        """Refuse by type before anything changes, else give the request its lineage."""
        try:
            check_request(recv_req.rid, recv_req.input_ids, self.model_config.vocab_size)
            lineage = admission.admit(self.ttt, self.session_controller, recv_req)
        except StateError as error:
            self._refuse(recv_req, error)
            return
        self._ttt_admitting = lineage
        _protect_bos(recv_req, self.tokenizer)
        try:
            super()._handle_generate_request(recv_req, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._ttt_admitting = None
        if lineage is not None:
            reach("queued", owner=lineage.owner, branch=lineage.branch)

    def _create_generation_req(self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
        """Hang the lineage on the request; its root state names the radix namespace."""
        req = super()._create_generation_req(recv_req, *args, **kwargs)  # type: ignore[misc]
        lineage = self._ttt_admitting
        if lineage is None:  # owns no state: its KV is the base model's
            req.extra_key = f"{req.extra_key or ''}|ttt:off"
            return req
        req.ttt = lineage
        lineage.req = req
        self.ttt.note_start(lineage)
        req.extra_key = namespace(req.extra_key, lineage.root.id, self.ttt.root)
        return req

    def _refuse(self: Any, recv_req: Any, error: StateError) -> None:
        """Answer ``recv_req`` with a typed error without running the model."""
        from sglang.srt.managers.schedule_batch import Req

        req = Req(
            recv_req.rid,
            recv_req.input_text,
            recv_req.input_ids or array("q", [0]),
            recv_req.sampling_params,
            vocab_size=self.model_config.vocab_size,
            stream=recv_req.stream,
            http_worker_ipc=recv_req.http_worker_ipc,
        )
        req.tokenizer = self.tokenizer
        self._answer_refusal(req, error)

    def _answer_refusal(self: Any, req: Any, error: StateError) -> None:
        """Refuse a request that holds nothing."""
        self.ttt.note_refusal(error)
        self._answer_error(req, error)

    def _answer_error(self: Any, req: Any, error: StateError) -> None:
        """End a request that holds nothing with a typed error."""
        from sglang.srt.disaggregation.utils import prepare_abort

        prepare_abort(req, error.to_header(), status_code=error.http_status)
        self.output_streamer.stream_output([req], req.return_logprob)

    def run_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the batch, then keep a chunked prefill whose owner failed from going on."""
        result = super().run_batch(*args, **kwargs)  # type: ignore[misc]
        self._ttt_changed = True
        self.stop_failed_chunk()
        return result

    def stop_failed_chunk(self: Any) -> None:
        """Have SGLang abort the request in chunks, with its typed error, before its next chunk."""
        lineage = getattr(self.chunked_req, "ttt", None)
        if lineage is not None and lineage.error is not None:
            self._pending_chunked_abort_req = self.chunked_req

    def end_waiting(self: Any, req: Any, error: StateError) -> None:
        """Take a request that its client gave up out of the queue."""
        self.waiting_queue.remove(req)
        self._release_aborted_request(req)
        self._answer_error(req, error)

    def _release_aborted_request(self: Any, req: Any) -> None:
        """A client went away; a request that holds a state is counted by ``settle``."""
        super()._release_aborted_request(req)  # type: ignore[misc]
        lineage = getattr(req, "ttt", None)
        if lineage is not None and lineage.state is None and lineage.error is None:
            self.ttt.note_end(lineage, "aborted")

    # Pages

    def get_prefill_adder_class(self: Any) -> type:
        """Admission counts delta pages beside KV (asked for in every pass, made once)."""
        if self._ttt_adder is None:
            self._ttt_adder = _adder_class(super().get_prefill_adder_class(), self)  # type: ignore[misc]
        adder: type = self._ttt_adder
        return adder

    def _get_new_batch_prefill_raw(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse a request that no amount of waiting could give its pages."""
        self._ttt_starved = None
        batch, running = super()._get_new_batch_prefill_raw(*args, **kwargs)  # type: ignore[misc]
        starved = self._ttt_starved
        if (
            batch is None
            and starved is not None
            and running.is_empty()
            and self.chunked_req is None
        ):
            self._refuse_starved(starved)
        return batch, running

    def _refuse_starved(self: Any, req: Any) -> None:
        lineage: RequestLineage = req.ttt
        pool = self.ttt.page_pool
        error = StateCapacity(
            f"the request needs {pages_needed(self, req)} delta pages at once, and of the "
            f"{pool.total - pool.reserved} that {pool.flag} gives only {pool.available} can be "
            f"had: raise it, or release pins and roots; {self.ttt.store.stats()}",
            owner=lineage.owner,
            branch=lineage.branch,
        )
        lineage.error = error
        self.waiting_queue.remove(req)
        self._release_aborted_request(req)
        self._answer_refusal(req, error)

    def update_running_batch(self: Any, batch: Any) -> Any:
        """One decode step: retract if KV or pages are short, then take the planner's rows."""
        with _counting_pages(self.ttt.store, batch), _unprepared(batch):
            updated = super().update_running_batch(batch)  # type: ignore[misc]
        if updated is None or updated.is_empty():
            return updated
        whole = updated.sampling_info.penalizer_orchestrator.is_required
        keep = self.ttt_rounds.take(updated.reqs, whole=whole)
        if keep is not None:
            return part_of(updated, keep)
        updated.prepare_for_decode()
        return updated


@contextmanager
def _counting_pages(store: TTTStateStore, batch: Any) -> Iterator[None]:
    """While open, the batch's memory check fails too when a step's delta pages cannot be had."""
    if len(batch.reqs) < 2 or store.ensure_pages(pages_opened(store, batch.reqs)):
        yield
        return
    stock = batch.check_decode_mem

    def check_decode_mem(*args: Any, selected_indices: Any = None, **kwargs: Any) -> bool:
        kept = batch.reqs if selected_indices is None else _pick(batch.reqs, selected_indices)
        if len(kept) > 1 and not store.ensure_pages(pages_opened(store, kept)):
            return False
        return bool(stock(*args, selected_indices=selected_indices, **kwargs))

    batch.check_decode_mem = check_decode_mem
    try:
        yield
    finally:
        del batch.check_decode_mem


@contextmanager
def _unprepared(batch: Any) -> Iterator[None]:
    """While open, the batch is filtered and retracted but not prepared for its forward pass."""
    batch.prepare_for_decode = lambda: None
    try:
        yield
    finally:
        del batch.prepare_for_decode


def pages_opened(store: TTTStateStore, reqs: list[Any]) -> int:
    """Delta pages that one decode step of ``reqs`` allocates."""
    opened = 0
    for req in reqs:
        lineage = getattr(req, "ttt", None)
        if lineage is not None and lineage.state is not None:
            opened += store.pages_needed(lineage.state, int(lineage.mode is Effect.WRITE), 1)
    return opened


def pages_needed(scheduler: Any, req: Any) -> int:
    """Delta pages that the next prefill chunk of ``req`` allocates, its tail's copies included."""
    tokens = len(req.full_untruncated_fill_ids) - req.prefix_len
    limit = scheduler.chunked_prefill_size
    if limit is not None and limit > 0:
        tokens = min(tokens, limit)
    return -(-tokens // scheduler.ttt.config.chunk) + 2


def _adder_class(base: type, scheduler: Any) -> type:
    from sglang.srt.managers.schedule_policy import AddReqResult

    serial = scheduler.ttt.options.mode == "serial"  # one owner per forward pass, prefill too

    class TTTPrefillAdder(base):  # type: ignore[misc, valid-type]
        """A PrefillAdder that admits a request only when its delta pages can be had."""

        _pages = 0  # promised to requests admitted in this pass

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            """Admit, or answer NO_TOKEN so that the request waits."""
            if serial and self.can_run_list:
                return AddReqResult.OTHER
            lineage = getattr(req, "ttt", None)
            if lineage is None:
                return super().add_one_req(req, *args, **kwargs)
            wanted = self._pages + pages_needed(scheduler, req)
            store = scheduler.ttt.store
            opened = pages_opened(store, self.running_batch.reqs)
            if not store.ensure_pages(wanted + opened):
                scheduler._ttt_starved = req
                return AddReqResult.NO_TOKEN
            req.init_next_round_input(self.tree_cache)  # eviction may have shortened the hit
            result = super().add_one_req(req, *args, **kwargs)
            if self.can_run_list and self.can_run_list[-1] is req:
                self._pages = wanted
                self.tree_cache.admit(req)
            return result

    return TTTPrefillAdder


def _pick(items: list[Any], indices: Any) -> list[Any]:
    return [items[i] for i in indices]


def _protect_bos(recv_req: Any, tokenizer: Any) -> None:
    """SGLang strips one leading BOS of an appended turn; ids are exact here, so offer it one."""
    parent = recv_req.session_params is not None and recv_req.session_params.rid is not None
    ids = recv_req.input_ids
    if parent and tokenizer is not None and len(ids) and ids[0] == tokenizer.bos_token_id:
        recv_req.input_ids = ids[:1] + ids
