"""The mutable record of one running branch."""

from typing import TypedDict

from sgl_rwttt.core.candidate import Candidate
from sgl_rwttt.core.lineage import LineageClock, tail_key_of
from sgl_rwttt.core.versions import StateView, Tail, Version


class ErrorNames(TypedDict):
    """Keyword arguments that name a branch in a `StateError`."""

    owner: str
    branch: str
    version: int


class OwnerState:
    """One running branch of an owner: its committed version, open tail and place in the lineage.

    Changed by the store only. `failed` may be set from outside: such a branch takes no more
    writes and its tail is not retained on release.
    """

    __slots__ = (
        "branch",
        "candidate",
        "clock",
        "failed",
        "generation",
        "owner",
        "released",
        "tail",
        "version",
    )

    def __init__(
        self,
        owner: str,
        branch: str,
        generation: int,
        version: Version,
        tail: Tail | None,
        clock: LineageClock,
    ) -> None:
        self.owner = owner
        self.branch = branch
        self.generation = generation  # unique in the store
        self.version = version  # a reference is held until release
        self.tail = tail  # a reference is held; None while no row is open
        self.clock = clock
        self.candidate: Candidate | None = None  # the open one, at most one
        self.failed = False
        self.released = False

    def __repr__(self) -> str:
        return f"OwnerState({self.owner}/{self.branch}, version={self.version.number})"

    @property
    def names(self) -> ErrorNames:
        """Owner, branch and version, for an error."""
        return {"owner": self.owner, "branch": self.branch, "version": self.version.number}

    @property
    def tail_key(self) -> bytes:
        """Item codes after the boundary up to the last WRITE token."""
        return tail_key_of(self.clock.codes)

    def view(self) -> StateView:
        """What the branch reads now."""
        version, tail, clock = self.version, self.tail, self.clock
        return StateView(
            self.owner,
            self.branch,
            version.number,
            version.id,
            version.base,
            version.pages,
            tail.page if tail else None,
            clock.rows,
            clock.position,
            clock.state_id,
        )
