"""The KV of whole contexts: rows of SGLang's pool, held by its radix tree.

Between two steps only: nothing else allocates while a ``Prefix`` is open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sgl_rwttt.core.errors import InvalidStateRequest, StateCapacity
from sgl_rwttt.core.faults import reach

from .snapshot_context import KVShape


class KVRows:
    """Copies KV out of and into one server's pool, through its radix cache."""

    def __init__(self, cache: Any) -> None:
        """Raises InvalidStateRequest for a pool that is not plain (quantized, another layout)."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        self._cache = cache
        self._allocator = cache.token_to_kv_pool_allocator
        pool = self._allocator.get_kvcache()
        if (
            type(pool) is not MHATokenToKVPool
            or pool.kv_cache_layout != "nhd"
            or pool.store_dtype != pool.dtype
            or pool.is_quantized_kv_cache
            or cache.page_size != 1
        ):
            raise InvalidStateRequest(
                f"the KV of this server cannot be saved or restored ({type(pool).__name__}, "
                f"{pool.dtype}): leave kv out"
            )
        self._pool = pool
        self.shape = KVShape(
            pool.layer_num, pool.head_num, pool.head_dim, pool.v_head_dim, pool.dtype
        )

    def find(self, key: Any) -> Tensor:
        """Slots of the longest prefix of a radix key whose KV is there, whatever its state."""
        found: Tensor = self._cache.find(key)[0]
        return found

    def export(self, slots: Tensor) -> dict[str, Tensor]:
        """Contiguous copies on the host: K [layers, n, heads, size] and V; layers may be 0."""
        layout = self.shape.layout(len(slots))
        copies = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in layout.items()}
        for name, rows in (("kv.K", self._pool.k_buffer), ("kv.V", self._pool.v_buffer)):
            for copy, layer in zip(copies[name], rows, strict=True):
                copy.copy_(layer[slots])
        return copies

    @contextmanager
    def prefix(self, key: Any) -> Iterator[Prefix]:
        """The part of a radix key whose KV is there, kept while open; the rest may be filled.

        What was filled and not inserted is given back.
        """
        slots, node = self._cache.find(key)
        lock = self._cache.lock(node)
        prefix = Prefix(self._cache, self._pool, key, slots)
        try:
            yield prefix
        finally:
            prefix.give_back()
            self._cache.unlock(lock)


class Prefix:
    """A radix key, the slots that the tree has for its beginning, and fresh ones for the rest."""

    def __init__(self, cache: Any, pool: Any, key: Any, slots: Tensor) -> None:
        self._cache = cache
        self._pool = pool
        self._key = key
        self._slots = slots
        self._fresh: Tensor | None = None
        self.found = len(slots)  # tokens
        self.missing = len(key) - self.found

    def fill(self, tensors: Mapping[str, Tensor], owner: str) -> None:
        """Take slots for the missing tokens, evicting others' KV, and fill them.

        ``tensors`` are of all tokens of the key. Raises StateCapacity.
        """
        allocator = self._cache.token_to_kv_pool_allocator
        allocator.evict_to_free_tokens(self._cache, self.missing)
        self._fresh = allocator.alloc(self.missing)
        if self._fresh is None:
            raise StateCapacity(
                f"the KV of {self.missing} tokens is needed, {allocator.available_size()} of "
                f"{allocator.size} can be had: raise --max-total-tokens, or wait",
                owner=owner,
            )
        reach("publish.allocated", owner=owner, kv=self.missing)
        for name, rows in (("kv.K", self._pool.k_buffer), ("kv.V", self._pool.v_buffer)):
            for layer, values in zip(rows, tensors[name], strict=True):
                layer[self._fresh] = values[self.found :].to(layer.device)
        reach("publish.copied", owner=owner, kv=self.missing)

    def insert(self) -> None:
        """Have the tree hold the filled slots, behind those that it had."""
        if self._fresh is not None:
            self._cache.hold(self._key, torch.cat([self._slots, self._fresh]), self.found)
            self._fresh = None

    def give_back(self) -> None:
        """Free what was filled and not inserted."""
        if self._fresh is not None:
            self._cache.token_to_kv_pool_allocator.free(self._fresh)
            self._fresh = None
