"""Errors keep their type and fields over the wire and inside a message."""

import pickle

import pytest

from sgl_rwttt.core import errors
from sgl_rwttt.core.errors import StaleVersion, StateError

CLASSES = [StateError, *StateError.__subclasses__()]
FIELDS = [
    {},
    {"owner": "a b]", "branch": "r=1/[x]", "version": 3},
    {"owner": "-", "branch": "", "version": 0},
    {"owner": "päge\n2", "version": 12},
]


def fields(error: StateError) -> tuple:
    return type(error), str(error), error.owner, error.branch, error.version


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
@pytest.mark.parametrize("given", FIELDS, ids=range(len(FIELDS)))
def test_round_trips(cls, given):
    """A typed error that arrives as a bare string, or names the wrong owner."""
    error = cls("limit 3 [x] of owner=z reached", **given)
    assert fields(StateError.from_wire(error.to_wire())) == fields(error)
    header = error.to_header()
    assert "\n" not in header
    assert fields(StateError.from_header(header)) == fields(error)
    assert fields(StateError.from_header(f"Bad request: {header}")) == fields(error)
    assert fields(pickle.loads(pickle.dumps(error))) == fields(error)
    assert 400 <= cls.http_status < 600


def test_unknown_types_and_plain_text():
    """A newer server's error type must not crash an older client."""
    wire = {"type": "NotYetKnown", "message": "m", "owner": "o", "branch": None, "version": None}
    assert fields(StateError.from_wire(wire)) == (StateError, "m", "o", None, None)
    assert StateError.from_header("out of memory") is None
    assert StateError.from_header("[NotYetKnown owner=a branch=b version=1] m") is None
    assert StaleVersion("a\nb").to_header().endswith("] a b")


def test_statuses_of_the_contract():
    """A client that retries on the wrong status."""
    wanted = {
        "StaleVersion": 409,
        "ForeignOwner": 403,
        "OwnerReleased": 410,
        "RollbackBeyondRetention": 410,
        "BranchBusy": 423,
        "StateCapacity": 507,
        "IncompatibleSnapshot": 422,
        "ReadOnlyState": 405,
        "UnsupportedByRule": 405,
        "UnknownOwner": 404,
        "UnknownState": 404,
        "InvalidStateRequest": 400,
        "WriteFailed": 500,
        "ServerGone": 503,
        "LedgerMismatch": 409,
    }
    assert {name: getattr(errors, name).http_status for name in wanted} == wanted
