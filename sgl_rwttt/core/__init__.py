"""The read-write contract: ids, effects, versions, owners, store, planner. No dependencies."""

from sgl_rwttt.core.candidate import Candidate
from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import (
    BranchBusy,
    ForeignOwner,
    IncompatibleSnapshot,
    IntegrityError,
    InvalidStateRequest,
    LedgerMismatch,
    OwnerReleased,
    ReadOnlyState,
    RollbackBeyondRetention,
    ServerGone,
    SlotError,
    StaleVersion,
    StateCapacity,
    StateError,
    UnknownOwner,
    UnknownState,
    UnsupportedByRule,
    WriteFailed,
)
from sgl_rwttt.core.lineage import (
    Boundary,
    LineageClock,
    cleared_root_id,
    root_id,
)
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.planner import (
    BatchPlanner,
    LegalGroup,
    PhaseKey,
    Round,
    Transition,
    group_transitions,
)
from sgl_rwttt.core.segment import DUMMY, BlockPart, Segment
from sgl_rwttt.core.slots import SlotPool
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.store import TTTStateStore
from sgl_rwttt.core.versions import Match, StateView, Tail, TailMemo, Version

__all__ = [
    "DUMMY",
    "BatchPlanner",
    "BlockPart",
    "Boundary",
    "BranchBusy",
    "Candidate",
    "ContextChain",
    "Effect",
    "ForeignOwner",
    "IncompatibleSnapshot",
    "IntegrityError",
    "InvalidStateRequest",
    "LedgerMismatch",
    "LegalGroup",
    "LineageClock",
    "Match",
    "ModeSpans",
    "OwnerReleased",
    "OwnerState",
    "PhaseKey",
    "ReadOnlyState",
    "RollbackBeyondRetention",
    "Round",
    "Segment",
    "ServerGone",
    "SlotError",
    "SlotPool",
    "StaleVersion",
    "StateCapacity",
    "StateError",
    "StateView",
    "TTTStateStore",
    "Tail",
    "TailMemo",
    "Transition",
    "UnknownOwner",
    "UnknownState",
    "UnsupportedByRule",
    "Version",
    "WriteFailed",
    "cleared_root_id",
    "group_transitions",
    "root_id",
]
