"""SGLang's torch_native attention with the common cases computed from a plan per forward pass."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.attention import Scratch, as_run
from sgl_rwttt.kernels.decode_attention import decode_attention


class ExtendRow(NamedTuple):
    """One request of a prefill."""

    start: int  # first new token in the batch
    count: int  # new tokens
    prefix: slice | torch.Tensor | None  # KV slots before them


class CPUAttnBackend(TorchNativeAttnBackend):
    """Decode and prefill of causal self-attention over a plain KV pool; the rest is stock.

    Stock serves encoders and cross attention, sliding windows, soft caps (which it ignores),
    values of another size than keys, quantized or otherwise laid out pools, and speculative steps.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        pool = self.token_to_kv_pool
        self._is_plain = (
            type(pool) is MHATokenToKVPool
            and pool.kv_cache_layout == "nhd"
            and pool.store_dtype == pool.dtype
            and not pool.is_quantized_kv_cache
        )
        self._scratch = Scratch()
        self._batch: Any = None  # the batch that the plan is for
        self._plan: Any = None  # of decode, or [ExtendRow]; None: stock
        self._decode = decode_attention(pool.dtype, self._scratch)
        self._extend = kernel("extend_attention", "cpu")

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the reads of all layers of one forward pass."""
        super().init_forward_metadata(forward_batch)
        self._batch, self._plan = forward_batch, self._make_plan(forward_batch)

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """One token per request; returns [tokens, heads * head size]."""
        plan = self._plan_for(forward_batch)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if not (
            isinstance(plan, self._decode.plan_type)
            and plan.rows == query.shape[0]
            and self._is_served(layer, query)
        ):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        out = self._decode.run(query, keys, values, plan, layer.scaling)
        return out.view(query.shape[0], -1)

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """The new tokens of every request; returns [tokens, heads * head size]."""
        plan = self._plan_for(forward_batch)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if (
            not isinstance(plan, list)
            or sum(row.count for row in plan) != query.shape[0]
            or not self._is_served(layer, query)
            or k is None
            or v is None
            or k.dtype != query.dtype
        ):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        keys, values = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        out = torch.empty_like(query)
        for start, count, prefix in plan:
            own = slice(start, start + count)
            out[own] = self._extend(
                query[own], k[own], v[own], keys, values, prefix, layer.scaling, self._scratch
            )
        return out.view(query.shape[0], -1)

    def _save(self, k: Any, v: Any, layer: Any, forward_batch: Any, save: bool) -> None:
        if save and k is not None and v is not None:
            location = KVWriteLoc(forward_batch.out_cache_loc, None)
            self.token_to_kv_pool.set_kv_buffer(layer, location, k, v)

    def _is_served(self, layer: Any, query: torch.Tensor) -> bool:
        return (
            layer.attn_type == AttentionType.DECODER
            and not layer.is_cross_attention
            and layer.sliding_window_size <= -1
            and not layer.logit_cap
            and layer.qk_head_dim == layer.v_head_dim
            and query.dtype == self.token_to_kv_pool.dtype
        )

    def _plan_for(self, forward_batch: Any) -> Any:
        if forward_batch is not self._batch:  # a part of the planned batch, or another one
            self._batch, self._plan = forward_batch, self._make_plan(forward_batch)
        return self._plan

    def _make_plan(self, batch: Any) -> Any:
        if not self._is_plain or batch.encoder_lens is not None or batch.spec_info is not None:
            return None
        if batch.forward_mode.is_decode():
            return self._decode_plan(batch)
        if batch.forward_mode == ForwardMode.EXTEND and batch.extend_prefix_lens is not None:
            return self._extend_plan(batch)
        return None

    def _decode_plan(self, batch: Any) -> Any:
        pool = self.token_to_kv_pool
        lengths = (batch.seq_lens if batch.seq_lens_cpu is None else batch.seq_lens_cpu).tolist()
        table = self.req_to_token_pool.req_to_token
        slots = table[batch.req_pool_indices, : max(lengths, default=0)].long()
        row_bytes = (pool.row_dim + pool.v_row_dim) * pool.dtype.itemsize
        return self._decode.plan(slots, lengths, row_bytes)

    def _extend_plan(self, batch: Any) -> list[ExtendRow]:
        table = self.req_to_token_pool.req_to_token
        plan, start = [], 0
        for row, count, before in zip(
            batch.req_pool_indices.tolist(),
            batch.extend_seq_lens.tolist(),
            batch.extend_prefix_lens.tolist(),
            strict=True,
        ):
            prefix = as_run(table[row, :before].long()) if before else None
            if count:
                plan.append(ExtendRow(start, count, prefix))
            start += count
        return plan
