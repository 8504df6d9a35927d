"""The prefix cache of a TTT checkpoint: KV is reused only together with the state at that point.

Beside SGLang's radix tree of KV stands the store's tree of states. A prefix of n tokens is a hit
when both trees still hold the point n. Keys carry what KV depends on besides the tokens: the root
state (in ``extra_key``, set at admission) and the mode in which each token was read.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import create_unified_radix_cache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sgl_rwttt.core.errors import StaleVersion, UnknownState
from sgl_rwttt.core.faults import reach
from sgl_rwttt.core.spans import ModeSpans

from .lineage import RequestLineage, mode_keys, namespace
from .runtime import TTTRuntime
from .seams import SeamError


def build_cache(ctx: Any) -> UnifiedRadixCache:
    """Factory registered as ``--radix-cache-backend ttt``.

    Raises SeamError when the loaded model is not one of ours (the checkpoint has no ttt_mode and
    no rule was asked for, or SGLang picked another class).
    """
    check_scheduler()
    runtime = getattr(ctx.tp_worker.model_runner.model, "ttt", None)
    if not isinstance(runtime, TTTRuntime):
        raise SeamError(
            "--radix-cache-backend ttt needs a checkpoint with ttt_mode: true or --ttt-backend, "
            "served by sgl_rwttt's model classes; got "
            f"{type(ctx.tp_worker.model_runner.model).__name__}"
        )
    cache: Any = create_unified_radix_cache(ctx, cache_class=TTTRadixCache)
    cache.runtime = runtime
    return cache


def check_scheduler() -> None:
    """Raise SeamError unless this process runs our scheduler: SGLang only logs a failed hook."""
    from sglang.srt.managers import scheduler

    from .scheduler import StateScheduling

    if not issubclass(scheduler.Scheduler, StateScheduling):
        raise SeamError("sglang.srt.managers.scheduler.Scheduler was not replaced by sgl_rwttt's")


class TTTRadixCache(UnifiedRadixCache):
    """A UnifiedRadixCache whose hits are truncated to points where the state is retained."""

    runtime: TTTRuntime | None = None
    _inserting: RequestLineage | None = None

    def match_prefix(self, params: MatchPrefixParams) -> Any:
        """Longest prefix whose KV and state are both retained. Changes no owner."""
        if params.req is None or self.runtime is None:
            return super().match_prefix(replace(params, key=_limited(params.key, 0)))
        lineage = getattr(params.req, "ttt", None)
        if lineage is None:  # owns no state: a namespace of its own (``extra_key``)
            return super().match_prefix(params)
        key = params.key
        keys = lineage.key_tokens(key.token_ids)
        limit = len(key)
        while True:
            depth = self._state_depth(lineage, key.token_ids, limit)
            result = super().match_prefix(replace(params, key=_limited(key, depth, keys)))
            if result.device_prefix_len >= depth:
                reach("matched", owner=lineage.owner, branch=lineage.branch)
                return result
            limit = result.device_prefix_len  # KV is gone beyond this: find a state before it

    def key_of(self, root: bytes, tokens: array[int], modes: ModeSpans) -> RadixKey:
        """The key of a context: its tokens in their modes, under its root."""
        assert self.runtime is not None
        return RadixKey(mode_keys(tokens, modes), namespace(None, root, self.runtime.root))

    def _state_depth(self, lineage: RequestLineage, tokens: array[int], limit: int) -> int:
        assert self.runtime is not None
        spans = lineage.extend_to(len(tokens))
        try:
            return self.runtime.store.match(
                lineage.root.id, tokens, spans, limit, lineage.chain
            ).depth
        except UnknownState:  # the session, and with it this root, was closed meanwhile
            return 0

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Insert the request's KV under keys that carry the mode of each token."""
        self._inserting = getattr(req, "ttt", None)
        try:
            super().checkpoint(req, up_to=up_to, **kwargs)
        finally:
            self._inserting = None

    def insert(self, params: InsertParams) -> Any:
        """Insert with mode-carrying keys (SGLang builds the key from plain tokens)."""
        lineage = self._inserting
        if lineage is not None:
            params = replace(params, key=_rekeyed(params.key, lineage))
        return super().insert(params)

    def find(self, key: RadixKey) -> tuple[Any, Any]:
        """(KV slots, node) of the longest prefix of ``key`` that the tree holds, state or not."""
        result = super().match_prefix(MatchPrefixParams(key=key))
        node = result.last_device_node
        return self.path_device_indices(node)[: result.device_prefix_len], node

    def hold(self, key: RadixKey, slots: Any, known: int) -> None:
        """Insert filled slots; the first ``known`` of them are the tree's own already."""
        super().insert(InsertParams(key=key, value=slots, prev_prefix_len=known))

    def maybe_hand_to_session(self, req: Any) -> None:
        """A request got its pool row: bind its owner's state to it."""
        super().maybe_hand_to_session(req)
        lineage = getattr(req, "ttt", None)
        if lineage is None or self.runtime is None:
            return
        if lineage.state is None and lineage.error is None:
            self.admit(req)
        self.runtime.bind(req.kv.req_pool_idx, lineage)

    def admit(self, req: Any) -> None:
        """Create the state of ``req`` at its matched prefix; a failure ends this request alone."""
        assert self.runtime is not None
        lineage: RequestLineage = req.ttt
        tokens, root, store = req.full_untruncated_fill_ids, lineage.root.id, self.runtime.store
        spans = lineage.extend_to(len(tokens))
        try:
            match = store.match(root, tokens, spans, req.prefix_len, lineage.chain)
            if match.depth != req.prefix_len:
                raise StaleVersion(
                    f"KV was matched to {req.prefix_len} tokens, the state only to {match.depth}",
                    owner=lineage.owner,
                    branch=lineage.branch,
                )
            lineage.state = store.create(lineage.owner, lineage.branch, match, root, tokens, spans)
            lineage.window = self.runtime.window(lineage, match.depth)
            reach("allocated", owner=lineage.owner, branch=lineage.branch)
        except RuntimeError as error:
            self.runtime.fail(lineage, lineage.typed(error))
            return
        self.runtime.counters["admissions"] += 1
        self.runtime.counters["hit_tokens"] += match.depth

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        """A request gives its row back: settle pins and context reset, then free its state."""
        super().on_release(req, checkpointed=checkpointed)
        if self.runtime is None:
            return
        lineage = self.runtime.unbind(req.kv.req_pool_idx)
        if lineage is not None and lineage.state is not None:
            self.runtime.settle(lineage, finished=checkpointed and req.finished())

    def release_session(self, session_id: str) -> None:
        """A session was closed, by request or by time-out: drop its roots and pins."""
        super().release_session(session_id)
        if self.runtime is not None:
            self.runtime.release_owner(session_id)

    def reset(self) -> None:
        """Flush: both trees forget together."""
        super().reset()
        if self.runtime is not None:
            self.runtime.reset()


def _limited(key: RadixKey, limit: int, tokens: array[int] | None = None) -> RadixKey:
    return RadixKey(
        key.token_ids if tokens is None else tokens,
        key.extra_key,
        is_bigram=key.is_bigram,
        limit=limit,
        cache_salt=key.cache_salt,
    )


def _rekeyed(key: RadixKey, lineage: RequestLineage) -> RadixKey:
    tokens = key.raw_token_ids()
    return _limited(key, len(tokens), lineage.key_tokens(tokens))
