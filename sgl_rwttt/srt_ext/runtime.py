"""The state runtime of one scheduler process: backend, store, rows, and what joins them.

Created by the model class of a TTT checkpoint, found by the cache and the scheduler through the
model. Single-threaded: every call comes from the scheduler thread.
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from typing import Any

import torch

from sgl_rwttt.backends.in_place import InPlaceBackend, InPlaceConfig
from sgl_rwttt.core.errors import OwnerReleased, StateError, UnknownOwner
from sgl_rwttt.core.lineage import root_id
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.slots import SlotPool
from sgl_rwttt.core.store import TTTStateStore

from .options import TTTOptions

logger = logging.getLogger(__name__)

_REMEMBERED_RELEASES = 4096


class TTTRuntime:
    """Owns the pools and the store; maps rows of SGLang's request pool to owners' states."""

    def __init__(self, config: InPlaceConfig, fingerprint: str, device: torch.device) -> None:
        options = TTTOptions.from_env()
        pages, bases = size_pools(config, options)
        self.config = config
        self.fingerprint = fingerprint
        self.boot_id = secrets.token_hex(8)
        self.backend = InPlaceBackend(config, pages=pages, bases=bases, device=device)
        self.fold_pages = fold_pages(config, options, self.backend.default_fold_pages)
        self.root = root_id(fingerprint, config.rule)
        self.store = TTTStateStore(
            pages=SlotPool(pages, "delta page", "--ttt-memory-mb"),
            bases=SlotPool(bases, "dense base", "--ttt-dense-fraction"),
            chunk=config.chunk,
            fold_pages=self.fold_pages,
            root=self.root,
            copy_rows=self.backend.copy_rows,
        )
        self.default_root = self.store.root("", self.root)
        self.rows: dict[int, Any] = {}  # request pool row -> RequestLineage
        self.released: OrderedDict[str, None] = OrderedDict()
        self.counters = dict.fromkeys(("admissions", "hit_tokens", "refused", "failed_writes"), 0)
        logger.info("TTT state runtime: %s", self.describe())

    def describe(self) -> dict[str, Any]:
        """Sizes of the pools (bytes, slots) and the rule, as reported at start and by /ttt/info."""
        return {
            **self.backend.report(),
            "fold_pages": self.fold_pages,
        }

    def is_released(self, owner: str) -> bool:
        """Whether ``owner`` was closed here (the newest few thousand are remembered)."""
        return owner in self.released

    def release_owner(self, owner: str) -> None:
        """Drop every root and pin of a closed session; remembers that it was released."""
        self.store.release_owner(owner)
        self.released[owner] = None
        while len(self.released) > _REMEMBERED_RELEASES:
            self.released.popitem(last=False)

    def bind(self, row: int, lineage: Any) -> None:
        """Give ``lineage``'s state the pool row ``row``; idempotent for later prefill chunks."""
        held = self.rows.get(row)
        if held is lineage:
            return
        if held is not None:
            raise RuntimeError(f"row {row} still belongs to {held.branch}, not {lineage.branch}")
        self.rows[row] = lineage

    def unbind(self, row: int) -> Any:
        """Take the lineage off row ``row``; None when the row has no owner."""
        return self.rows.pop(row, None)

    @property
    def shape(self) -> tuple[object, ...]:
        """Everything that the operators' shape depends on (the planner's shape class)."""
        return self.config.rule, self.config.d_model, self.config.d_ff, str(self.backend.dtype)

    def committed_version(self, owner: str, branch: str) -> int:
        """Committed version number of a running branch; raises UnknownOwner."""
        state = self.store.owner_state(owner, branch)
        if state is None:
            raise UnknownOwner(f"branch {branch} does not run", owner=owner, branch=branch)
        return state.version.number

    def settle(self, lineage: Any, *, finished: bool) -> None:
        """End ``lineage``'s run: pin and reset if it ``finished``, report, release the state.

        A pin or reset that fails is reported in the answer's state, which is otherwise complete.
        """
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        state = lineage.require_state()
        aborted = isinstance(lineage.req.finished_reason, FINISH_ABORT)
        try:
            if finished and not aborted and lineage.error is None and lineage.session:
                self._pin_and_clear(lineage, state)
        except StateError as error:
            lineage.late_error = error
        lineage.close(state)
        self.store.release(state, keep_tail=lineage.error is None)

    def _pin_and_clear(self, lineage: Any, state: OwnerState) -> None:
        if self.is_released(lineage.owner):
            raise OwnerReleased(
                "the session was closed", owner=lineage.owner, branch=lineage.branch
            )
        if lineage.pin is not None:
            self.store.pin(lineage.owner, lineage.pin, state)
            lineage.pinned = True
        if lineage.clear is not None:
            lineage.next_root = self.store.open_root(lineage.owner, state.version)

    def reset(self) -> None:
        """Forget every memo (flush_cache); states that somebody still holds stay."""
        self.store.flush()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the ledgers and reference counts of the store balance."""
        self.store.check_integrity()

    def fail(self, lineage: Any, error: StateError) -> None:
        """End ``lineage``'s request with ``error`` and one log line; nobody else notices."""
        self.counters["failed_writes"] += 1
        logger.error("ttt_write_failed %s", error.to_header())
        lineage.fail(error)


def size_pools(config: InPlaceConfig, options: TTTOptions) -> tuple[int, int]:
    """(pages, dense bases) that fit ``--ttt-memory-mb``; raises ValueError when none would."""
    layers, chunk = len(config.layers), config.chunk
    page_bytes = 4 * layers * chunk * (config.d_ff + config.d_model)
    base_bytes = 4 * layers * config.d_ff * config.d_model
    budget = options.memory_mb * 1024 * 1024
    dense = 0 if options.fold_rows == 0 else int(budget * options.dense_fraction)
    bases = dense // base_bytes
    pages = (budget - bases * base_bytes) // page_bytes
    if pages < 4:
        raise ValueError(
            f"--ttt-memory-mb={options.memory_mb} holds {pages} delta pages of {page_bytes} bytes "
            f"({layers} layers, chunk {chunk}); at least 4 are needed"
        )
    return pages + 1, bases + 1  # slot 0 of each pool is the dummy


def fold_pages(config: InPlaceConfig, options: TTTOptions, default: int) -> int:
    """Pages since the last base after which a version gets a base of its own (0 = never)."""
    if options.fold_rows is None:
        return default
    return -(-options.fold_rows // config.chunk)
