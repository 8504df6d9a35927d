"""Typed errors of the read-write contract, with their HTTP status and wire forms.

Every error names what it concerns (owner, branch, version) so that a client can act on it
without parsing prose. The same classes are raised in the server and rebuilt in the client.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import quote, unquote

_HEADER = re.compile(r"\[(\w+) owner=(\S*) branch=(\S*) version=(\S*)\] (.*)", re.DOTALL)
_NONE = "-"


class StateError(RuntimeError):
    """Base of all errors of the state contract; `str(e)` is the message alone."""

    http_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        owner: str | None = None,
        branch: str | None = None,
        version: int | None = None,
    ) -> None:
        super().__init__(message)
        self.owner = owner
        self.branch = branch
        self.version = version

    def to_wire(self) -> dict[str, Any]:
        """The JSON form: {"type", "message", "owner", "branch", "version"}."""
        return {
            "type": type(self).__name__,
            "message": str(self),
            "owner": self.owner,
            "branch": self.branch,
            "version": self.version,
        }

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> "StateError":
        """Rebuild the error of `to_wire`; an unknown type becomes a plain `StateError`."""
        cls = _types().get(str(wire.get("type")), StateError)
        return cls(
            str(wire.get("message", "")),
            owner=wire.get("owner"),
            branch=wire.get("branch"),
            version=wire.get("version"),
        )

    def to_header(self) -> str:
        """One line, "[Type owner=.. branch=.. version=..] message"; absent fields are "-"."""
        version = _NONE if self.version is None else str(self.version)
        fields = f"owner={_field(self.owner)} branch={_field(self.branch)} version={version}"
        return f"[{type(self).__name__} {fields}] {' '.join(str(self).splitlines())}"

    @staticmethod
    def from_header(text: str) -> "StateError | None":
        """Find and parse a `to_header` form inside `text`; None when there is none."""
        found = _HEADER.search(text)
        if found is None or found[1] not in _types():
            return None
        version = int(found[4]) if re.fullmatch(r"-?\d+", found[4]) else None
        return _types()[found[1]](
            found[5], owner=_unfield(found[2]), branch=_unfield(found[3]), version=version
        )


class StaleVersion(StateError):
    """The version or generation that the caller expected is no longer the committed one."""

    http_status = 409


class ForeignOwner(StateError):
    """The state exists but belongs to another owner."""

    http_status = 403


class OwnerReleased(StateError):
    """The owner record was released; late writes and second releases end here."""

    http_status = 410


class RollbackBeyondRetention(StateError):
    """The requested earlier point is not retained and cannot be recomputed."""

    http_status = 410


class BranchBusy(StateError):
    """The branch is running: it has a live owner record or an open candidate."""

    http_status = 423


class StateCapacity(StateError):
    """A pool is exhausted even after eviction; the message holds the limit and its flag."""

    http_status = 507


class IncompatibleSnapshot(StateError):
    """A snapshot does not fit the model, rule or layout; the message names the field."""

    http_status = 422


class ReadOnlyState(StateError):
    """A WRITE was asked of a frozen state."""

    http_status = 405


class UnsupportedByRule(StateError):
    """The update rule has no such operation."""

    http_status = 405


class UnknownOwner(StateError):
    """No owner of that name is open."""

    http_status = 404


class UnknownState(StateError):
    """No root, pin or version of that id is known."""

    http_status = 404


class InvalidStateRequest(StateError, ValueError):
    """The request is malformed; nothing was changed."""

    http_status = 400


class SlotError(StateError, ValueError):
    """A slot was freed twice, or is the dummy, a sentinel or out of range."""

    http_status = 500


class WriteFailed(StateError):
    """A WRITE produced no usable candidate (exception or non-finite values)."""

    http_status = 500


class ServerGone(StateError):
    """Client side: the server restarted or cannot be reached, its states are gone."""

    http_status = 503


class LedgerMismatch(StateError):
    """Client side: the server's state report differs from the client's own ledger."""

    http_status = 409


class IntegrityError(AssertionError):
    """`check_integrity` found the books out of balance; the message carries the numbers."""


def _types() -> dict[str, type[StateError]]:
    found: dict[str, type[StateError]] = {"StateError": StateError}
    for cls in StateError.__subclasses__():
        found[cls.__name__] = cls
    return found


def _field(value: str | None) -> str:
    if value is None:
        return _NONE
    return "%2D" if value == _NONE else quote(value, safe="")


def _unfield(text: str) -> str | None:
    return None if text == _NONE else unquote(text)
