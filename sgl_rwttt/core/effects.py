"""What a transition does to its owner's state (terms of the RW-TTT paper)."""

from enum import StrEnum


class Effect(StrEnum):
    """READ applies version v and leaves it; WRITE makes a candidate of v+1; CONTROL moves v.

    As the mode of a token: a WRITE token is evidence (it adds a row to the tail), a READ token
    applies the state and leaves no evidence. No token has the mode CONTROL.
    """

    READ = "read"
    WRITE = "write"
    CONTROL = "control"
