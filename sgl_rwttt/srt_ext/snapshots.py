"""Save and restore of committed versions, between the store, the backend and the folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from sgl_rwttt.backends.base import StateBackend
from sgl_rwttt.core.errors import StateError
from sgl_rwttt.core.snapshots import Restored, chain_of
from sgl_rwttt.core.store import TTTStateStore
from sgl_rwttt.core.versions import Version

from . import snapshot_file
from .rules import RuleConfig
from .snapshot_context import Layout
from .snapshot_file import Fit
from .snapshot_folder import SnapshotFolder


def required_fields(config: RuleConfig, dtype: str, fingerprint: str) -> dict[str, str]:
    """The header fields that must be equal for a file to fit a server."""
    return {
        "format": snapshot_file.FORMAT,
        "layers": ",".join(map(str, config.layers)),
        "chunk": str(config.chunk),
        "dtype": dtype,
        "rule": config.rule,
        "fingerprint": fingerprint,
    }


class Snapshots:
    """The snapshots of one server. Runs on the scheduler thread, between two steps."""

    def __init__(
        self,
        folder: SnapshotFolder,
        fits: Sequence[Fit],
        store: TTTStateStore,
        backend: StateBackend[Any],
        form_of: Callable[[Sequence[int]], int],
    ) -> None:
        """``fits`` for each form of the rule; ``form_of`` says which a version has by its pages."""
        self.folder = folder
        self._fits = tuple(fits)
        self._store = store
        self._backend = backend
        self._form_of = form_of

    def save(self, name: str, version: Version, replace: bool = False) -> int:
        """Write a live version to file ``name``; returns its size in bytes.

        Raises InvalidStateRequest for a bad or existing name, StateCapacity at a limit or with a
        full disk, IncompatibleSnapshot when the version is not finite; the folder is as before
        then.
        """
        self.folder.check_new(name, replace)
        chain = chain_of(version)
        fit = self._fit_of(version)
        layout = snapshot_file.sections_of(chain, None, fit.shapes).version
        blank = snapshot_file.blank_header(fit.fields, chain, layout)
        size = self._checked_size(blank, layout)
        with memory_errors(f"snapshot {name!r} was not saved"):
            tensors = {key: each.cpu() for key, each in self._backend.export(version).items()}
        snapshot_file.check_finite(tensors)
        self.folder.create(
            name, lambda file: snapshot_file.write(file, blank, tensors), replace=replace
        )
        return size

    def restore(self, name: str, owner: str) -> tuple[Restored, int]:
        """Open the root of file ``name`` for ``owner``; see ``SnapshotPath.restore``.

        Returns also the file's bytes. Of a file with a context it takes the version alone.

        While the version is still retained its data is neither read nor loaded again. Raises
        UnknownState, InvalidStateRequest, IncompatibleSnapshot naming the field, StateCapacity;
        nothing but the memo has changed then.
        """
        with memory_errors(f"snapshot {name!r} was not restored"):
            with self.folder.open(name) as (file, size):
                header = snapshot_file.read_header(file, size)
                sections = header.check(header.fit(self._fits))
                chain = header.chain
                tensors: dict[str, Tensor] = {}
                if not self._store.snapshots.retains(chain[-1]):
                    tensors = snapshot_file.read_section(file, header, sections, "version")
            fill = partial(self._backend.restore, tensors)
            return self._store.snapshots.restore(owner, chain, fill), size

    def _fit_of(self, version: Version) -> Fit:
        return self._fits[self._form_of(version.pages)]

    def _checked_size(self, blank: bytes, layout: Layout) -> int:
        size = len(blank) + snapshot_file.data_bytes(layout)
        self.folder.check_size(size)
        return size

    def listing(self) -> dict[str, Any]:
        """Every snapshot with its size and version, or with the reason why it does not fit."""
        return {
            "snapshots": [self._describe(name) for name in self.folder.names()],
            "max_snapshots": self.folder.max_files,
            "max_bytes": self.folder.max_bytes,
        }

    def _describe(self, name: str) -> dict[str, Any]:
        try:
            with self.folder.open(name) as (file, size):
                modified = os.fstat(file.fileno()).st_mtime
                header = snapshot_file.read_header(file, size)
            header.check(header.fit(self._fits))
            context = header.context
        except StateError as error:
            return {"name": name, "error": error.to_wire()}
        return {
            "name": name,
            "bytes": size,
            "modified": modified,
            "version": int(header.fields["version"]),
            "version_id": header.fields["version_id"],
            "state_id": header.fields["state_id"],
            "position": 0 if context is None else context.position,
        }


@contextmanager
def memory_errors(failed: str) -> Iterator[None]:
    """An error of the device or of its memory ends this verb, not the server."""
    try:
        yield
    except StateError:
        raise
    except (RuntimeError, MemoryError) as error:
        raise StateError(f"{failed}: {error}") from error
