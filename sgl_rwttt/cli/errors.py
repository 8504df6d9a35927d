"""How a command ends early; see ``main`` for the exit statuses."""

from __future__ import annotations

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130


class CommandFailed(Exception):
    """The command was understood and did not work out: status 1."""


class UsageError(Exception):
    """The command line, or a file that it names, is wrong; nothing was done: status 2."""
