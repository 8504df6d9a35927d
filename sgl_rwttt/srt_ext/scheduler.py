"""SGLang's scheduler with owners: admission, control verbs, and what happens when pages run out."""

from __future__ import annotations

import logging
from array import array
from functools import partial
from typing import Any

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import StateCapacity, StateError
from sgl_rwttt.core.store import TTTStateStore

from . import admission, verbs
from .lineage import RequestLineage
from .report import streamer_class
from .runtime import TTTRuntime

logger = logging.getLogger(__name__)


def scheduler_class(base: type) -> type:
    """The subclass of SGLang's Scheduler that serves a TTT checkpoint."""
    return type("TTTScheduler", (StateScheduling, base), {})


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

    def _create_generation_req(self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
        """Hang the lineage on the request; its root state names the radix namespace."""
        req = super()._create_generation_req(recv_req, *args, **kwargs)  # type: ignore[misc]
        lineage = self._ttt_admitting
        if lineage is not None:
            req.ttt = lineage
            lineage.req = req
            if lineage.root.id != self.ttt.root:
                req.extra_key = f"{req.extra_key or ''}|ttt:{lineage.root.id.hex()}"
        return req

    def _refuse(self: Any, recv_req: Any, error: StateError) -> None:
        """Answer ``recv_req`` with a typed error without running the model."""
        from sglang.srt.managers.schedule_batch import Req

        self.ttt.counters["refused"] += 1
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
        """End a request that holds nothing with a typed error."""
        from sglang.srt.disaggregation.utils import prepare_abort

        logger.warning("ttt_refused %s", error.to_header())
        prepare_abort(req, error.to_header(), status_code=error.http_status)
        self.output_streamer.stream_output([req], req.return_logprob)

    def run_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the batch, then keep a chunked prefill whose owner failed from going on."""
        result = super().run_batch(*args, **kwargs)  # type: ignore[misc]
        self.stop_failed_chunk()
        return result

    def stop_failed_chunk(self: Any) -> None:
        """Have SGLang abort the request in chunks, with its typed error, before its next chunk."""
        lineage = getattr(self.chunked_req, "ttt", None)
        if lineage is not None and lineage.error is not None:
            self._pending_chunked_abort_req = self.chunked_req

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
        error = StateCapacity(
            f"the request needs {pages_needed(self, req)} delta pages at once and the pool "
            f"cannot free them: raise --ttt-memory-mb; {self.ttt.store.stats()}",
            owner=lineage.owner,
            branch=lineage.branch,
        )
        self.waiting_queue.remove(req)
        self._release_aborted_request(req)
        self._answer_refusal(req, error)

    def update_running_batch(self: Any, batch: Any) -> Any:
        """Retract, as for KV, when the pages that this step opens cannot be had."""
        store = self.ttt.store
        if len(batch.reqs) < 2 or store.ensure_pages(pages_opened(store, batch.reqs)):
            return super().update_running_batch(batch)  # type: ignore[misc]
        stock = batch.check_decode_mem

        def check_decode_mem(*args: Any, selected_indices: Any = None, **kwargs: Any) -> bool:
            kept = batch.reqs if selected_indices is None else _pick(batch.reqs, selected_indices)
            if len(kept) > 1 and not store.ensure_pages(pages_opened(store, kept)):
                return False
            return bool(stock(*args, selected_indices=selected_indices, **kwargs))

        batch.check_decode_mem = check_decode_mem
        try:
            return super().update_running_batch(batch)  # type: ignore[misc]
        finally:
            del batch.check_decode_mem


def refused_weight_updates() -> list[tuple[type, Any]]:
    """Handlers that answer every replacement of weights with a refusal.

    A state is a difference from the weights that it was computed with.
    """
    from sglang.srt.managers import io_struct

    message = "weights of a TTT checkpoint cannot be replaced while serving: restart the server"
    kinds = ("UpdateWeightFromDisk", "UpdateWeightsFromDistributed", "UpdateWeightsFromTensor")
    pairs = []
    for kind in (*kinds, "UpdateWeightsFromIPC"):
        output = getattr(io_struct, f"{kind}ReqOutput")
        answer = partial(output, success=False, message=message)
        pairs.append((getattr(io_struct, f"{kind}ReqInput"), lambda _, answer=answer: answer()))
    return pairs


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

    class TTTPrefillAdder(base):  # type: ignore[misc, valid-type]
        """A PrefillAdder that admits a request only when its delta pages can be had."""

        _pages = 0  # promised to requests admitted in this pass

        def add_one_req(self, req: Any, *args: Any, **kwargs: Any) -> Any:
            """Admit, or answer NO_TOKEN so that the request waits."""
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
