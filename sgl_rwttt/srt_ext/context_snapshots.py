"""Save and restore of contexts: the committed version, and everything behind it with its KV."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as replaced
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.backends.base import StateBackend
from sgl_rwttt.core.contexts import Point, PointState, Resumed, check_point, extends_root
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.store import TTTStateStore

from . import snapshot_file
from .kv_rows import KVRows
from .options import TTTOptions
from .rules import only_form
from .snapshot_context import (
    ROOT,
    Context,
    check_context,
    check_tokens,
    root_tensors,
)
from .snapshot_fields import refuse
from .snapshot_file import Fit
from .snapshot_folder import SnapshotFolder
from .snapshots import Snapshots, memory_errors

KeyOf = Callable[[bytes, "array[int]", ModeSpans], Any]


class RestoredContext(NamedTuple):
    """What a restore of a context did."""

    context: Context
    point: Point
    tokens: array[int]
    resumed: Resumed
    kv_loaded: int  # tokens whose KV came from the file; that of the others was there
    bytes: int  # of the file


class ContextSnapshots(Snapshots):
    """The snapshots of one server, with or without a context."""

    def has_context(self, name: str) -> bool:
        """Whether the file's header names a context; raises as ``restore``, but for what fits."""
        with self.folder.open(name) as (file, size):
            return "context" in snapshot_file.read_header(file, size).fields

    def save_context(
        self,
        name: str,
        state: PointState,
        tokens: Sequence[int],
        modes: ModeSpans,
        kv: KVRows,
        slots: Tensor,
        client: str,
        replace: bool = False,
    ) -> int:
        """Write a point, its tokens with their modes and their KV; as ``save``.

        ``slots`` are those of the KV of all tokens; ``client`` is kept as it is.
        """
        self.folder.check_new(name, replace)
        point, blank_sum, fit = state.point, "0" * 64, self._fit_of(state.version)
        check_point(point, {fit.root})
        state_id = point.context.state_id_at(point.position).hex()
        context = Context(
            state_id=state_id,
            position=point.position,
            tail=state.rows,
            modes=modes,
            root=point.root,
            kv=kv.shape,
            client=client,
            checksum=blank_sum,
            kv_checksum=blank_sum,
        )
        layout = snapshot_file.merged(snapshot_file.sections_of(point.head, context, fit.shapes))
        blank = snapshot_file.blank_header(fit.fields, point.head, layout, context)
        size = self._checked_size(blank, layout)
        with memory_errors(f"snapshot {name!r} was not saved"):
            version = {k: each.cpu() for k, each in self._backend.export(state.version).items()}
            rest = self._context_tensors(point, state, tokens)
            rows = kv.export(slots)
        for tensors in (version, rest, rows):
            snapshot_file.check_finite(tensors)
        context = replaced(
            context,
            checksum=snapshot_file.checksum_of(rest),
            kv_checksum=snapshot_file.checksum_of(rows),
        )
        blank = snapshot_file.blank_header(fit.fields, point.head, layout, context)
        more = rest | rows
        self.folder.create(
            name, lambda file: snapshot_file.write(file, blank, version, more), replace=replace
        )
        return size

    def _context_tensors(
        self, point: Point, state: PointState, tokens: Sequence[int]
    ) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if not extends_root(point):
            root = self._backend.export(self._store.snapshots.at(point.root[-1].id, ""))
            found = {ROOT + key: each.cpu() for key, each in root.items()}
        if state.tail is not None:
            tail = self._backend.export_tail(state.tail.tail.page, state.rows)
            found |= {key: each.cpu() for key, each in tail.items()}
        return found | {"tokens": torch.tensor(list(tokens), dtype=torch.int64)}

    def restore_context(
        self, name: str, owner: str, pin: str, limits: tuple[int, int], kv: KVRows, key_of: KeyOf
    ) -> RestoredContext:
        """Publish the point of file ``name`` with its KV for ``owner``, retained under ``pin``.

        ``limits``: most tokens of a context, and vocabulary; ``key_of`` makes a radix key. What is
        still retained is not read. Raises as ``restore``; nothing but the memo and cached KV has
        changed then.
        """
        failed = f"snapshot {name!r} was not restored"
        with memory_errors(failed), self.folder.open(name) as (file, size):
            header = snapshot_file.read_header(file, size)
            fit = header.fit(self._fits)
            sections = header.check(fit)
            context = header.context
            if context is None:
                refuse("context", "the file holds the weights only: restore without kv")
            check_context(context, limits[0], kv.shape)
            read = partial(snapshot_file.read_section, file, header, sections)
            tensors = read("context")
            tokens = array("q", tensors["tokens"].tolist())
            check_tokens(tokens, limits[1])
            point = context.point(header.chain, tokens, self._store.chunk, fit.root)
            key = key_of(point.context.root, tokens, context.modes)
            with kv.prefix(key) as prefix:
                if self._store.contexts.missing(point).head:
                    tensors |= read("version")
                if prefix.missing:
                    prefix.fill(read("kv"), owner)
                resumed = self._resume(owner, pin, point, tensors, fit)
                prefix.insert()
        return RestoredContext(context, point, tokens, resumed, prefix.missing, size)

    def _resume(
        self, owner: str, pin: str, point: Point, tensors: Mapping[str, Tensor], fit: Fit
    ) -> Resumed:
        backend, root = self._backend, root_tensors(tensors, point, fit.shapes)
        tail = {key: each for key, each in tensors.items() if key.startswith("tail.")}

        def fill(base: int | None, pages: tuple[int, ...], tail_page: int | None) -> None:
            backend.restore(tensors, base, pages)
            if tail_page is not None:
                backend.restore_tail(tail, tail_page)

        return self._store.contexts.resume(owner, pin, point, partial(backend.restore, root), fill)


def open_snapshots(
    options: TTTOptions,
    fits: Sequence[Fit],
    store: TTTStateStore,
    backend: StateBackend[Any],
    form_of: Callable[[Sequence[int]], int] = only_form,
) -> ContextSnapshots | None:
    """The snapshots that the options ask for; ValueError, naming the flag, for a bad folder."""
    if options.snapshot_dir is None:
        return None
    folder = SnapshotFolder(options.snapshot_dir, options.snapshot_mb << 20, options.max_snapshots)
    return ContextSnapshots(folder, fits, store, backend, form_of)
