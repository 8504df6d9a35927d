"""The state runtime of one scheduler process: backend, store, rows, and what joins them.

Created by the model class of a TTT checkpoint, found by the cache and the scheduler through the
model. Single-threaded: every call comes from the scheduler thread.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import InvalidStateRequest, OwnerReleased, StateError, UnknownOwner
from sgl_rwttt.core.faults import reach
from sgl_rwttt.core.lineage import root_id
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.planner import Transition
from sgl_rwttt.core.retention import RetentionWindow
from sgl_rwttt.core.store import TTTStateStore
from sgl_rwttt.core.versions import Version

from .context_snapshots import open_snapshots
from .logs import event_line, public_name
from .metrics import TTTMetrics, make_metrics
from .options import ENV_BOOT, TTTOptions
from .rules import RuleConfig, state_parts
from .snapshots import Fit, required_fields

if TYPE_CHECKING:
    from .lineage import RequestLineage

logger = logging.getLogger(__name__)

_REMEMBERED_RELEASES = 4096
_COUNTED = (
    "admissions",
    "hit_tokens",
    "refused",
    "failed_writes",
    "retried_writes",
    "aborted",
    "retracted",
    "commits",
    "updates",
    "forks",
    "rollbacks",
    "snapshot_saves",
    "snapshot_restores",
    "snapshot_hits",
)


class TTTRuntime:
    """Owns the pools and the store; maps rows of SGLang's request pool to owners' states."""

    def __init__(
        self,
        config: RuleConfig,
        fingerprint: str,
        device: torch.device,
        others: Sequence[tuple[RuleConfig, str]] = (),
    ) -> None:
        """``others``: further forms of the rule (ranks) that owners may ask for, with theirs."""
        options = TTTOptions.from_env()
        parts = state_parts([config, *(other for other, _ in others)], options, device)
        self.config = config
        self.boot_id = os.environ.get(ENV_BOOT) or secrets.token_hex(8)
        self.options = options
        self.backend = parts.backend
        self.backend.write_group = options.target_batch
        self.fold_pages = parts.fold_pages
        self.forms = parts.forms
        self.form_of = parts.form_of
        self.fingerprints = [fingerprint, *(each for _, each in others)]
        self.placement = str(device)
        roots = [
            root_id(each, form.config.rule)
            for each, form in zip(self.fingerprints, parts.forms, strict=True)
        ]
        self.root = roots[0]
        self.page_pool = parts.pages
        self.store = TTTStateStore(
            pages=parts.pages,
            bases=parts.bases,
            chunk=config.chunk,
            fold_pages=parts.fold_pages,
            root=self.root,
            copy_rows=self.backend.copy_rows,
            evidence=parts.evidence,
            more_roots={
                root: form.start for root, form in zip(roots[1:], parts.forms[1:], strict=True)
            },
        )
        self.roots = [self.store.root("", root) for root in roots]
        self.default_root = self.roots[0]
        dtype = self.backend.report()["dtype"]
        fits = [
            Fit(required_fields(form.config, dtype, each), root, form.shapes)
            for form, each, root in zip(parts.forms, self.fingerprints, roots, strict=True)
        ]
        self.snapshots = open_snapshots(options, fits, self.store, self.backend, self.form_of)
        self.rows: dict[int, Any] = {}  # request pool row -> RequestLineage
        self.by_rid: dict[str, Any] = {}  # the same lineages by request id
        self.released: OrderedDict[str, None] = OrderedDict()
        self.retained = parts.retained
        self.metrics: TTTMetrics = make_metrics()
        self.counters = dict.fromkeys(_COUNTED, 0)
        logger.info("TTT state runtime: %s", self.describe())

    def describe(self) -> dict[str, Any]:
        """Sizes of the pools (bytes, slots) and the rule, as reported at start and by /ttt/info."""
        return {
            **self.backend.report(),
            "fold_pages": self.fold_pages,
        }

    def form_with(self, rank: int | None) -> int:
        """Index of the form that an owner asks for; None asks for the default one.

        Raises InvalidStateRequest naming what there is.
        """
        if rank is None:
            return 0
        ranks = [getattr(form.config, "rank", None) for form in self.forms]
        if rank not in ranks:
            there = "its rule has no rank" if ranks == [None] else f"it has {ranks} (--ttt-rank)"
            raise InvalidStateRequest(f"the server serves no rank {rank}: {there}")
        return ranks.index(rank)

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
        self.rows[row] = self.by_rid[lineage.branch] = lineage

    def unbind(self, row: int) -> Any:
        """Take the lineage off row ``row``; None when the row has no owner."""
        lineage = self.rows.pop(row, None)
        if lineage is not None:
            del self.by_rid[lineage.branch]
        return lineage

    def transition(self, lineage: RequestLineage, effect: Effect) -> Transition:
        """The next step of a running lineage, with ``effect``, as the planner sees it."""
        version = lineage.require_state().version
        return Transition(
            owner=lineage.owner,
            branch=lineage.branch,
            backend=self.backend.name,
            shape=self.forms[self.form_of(version.pages)].shape,
            effect=effect,
            expected_version=version.number,
            placement=self.placement,
        )

    def count(self, name: str, n: int = 1) -> None:
        """Count ``n`` events, for ``/ttt/info`` and for the metrics; a key of ``COUNTERS``."""
        self.counters[name] += n
        self.metrics.count(name, n)

    def note_start(self, lineage: RequestLineage) -> None:
        """Count how an admitted request continues its parent."""
        for name in lineage.starts:
            self.count(name)

    def note_refusal(self, error: StateError, **more: str) -> None:
        """Count a refusal and write its log line."""
        self.counters["refused"] += 1
        self.metrics.refused(type(error).__name__)
        logger.warning(event_line("ttt_refused", error, **more))

    def window(self, lineage: RequestLineage, position: int) -> RetentionWindow | None:
        """What a branch that starts at ``position`` keeps; None without a limit."""
        if self.retained is None:
            return None
        return RetentionWindow(self.store, self.retained, lineage.chain, position)

    def expire_older(self, lineage: RequestLineage, position: int) -> None:
        """Keep of a restored lineage what a running branch at ``position`` would keep."""
        if self.retained is None:
            return
        last = lineage.chain.index_at(position)
        for index in range(1, max(1, last - self.retained + 1)):
            self.store.expire(lineage.chain.version_id(index))

    def committed(self, lineage: RequestLineage, versions: list[Version]) -> None:
        """``lineage`` committed these versions: count them, and expire older ones."""
        if not versions:
            return
        self.count("commits", len(versions))
        if lineage.window is not None:
            lineage.window.passed(versions)

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
            reach("finished", owner=lineage.owner, branch=lineage.branch)
            if finished and not aborted and lineage.error is None and lineage.session:
                self._pin_and_clear(lineage, state)
        except RuntimeError as error:
            lineage.late_error = lineage.typed(error)
        lineage.close(state)
        self.store.release(state, keep_tail=lineage.error is None)
        if aborted and lineage.error is None:
            self.note_end(lineage, "aborted")
        elif not finished and not lineage.req.finished():
            self.note_end(lineage, "retracted")

    def note_end(self, lineage: RequestLineage, how: str) -> None:
        """Count and log a run that ended before its time, by its client or for memory."""
        self.counters[how] += 1
        name, branch = public_name(lineage.owner), quote(lineage.branch, safe="")
        logger.info("ttt_%s owner=%s branch=%s", how, name, branch)

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
        self.count("failed_writes")
        logger.error(event_line("ttt_write_failed", error))
        lineage.fail(error)
