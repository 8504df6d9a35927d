"""What the subcommands' parsers have in common."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = argparse._SubParsersAction

KEY_VARIABLE = "RWTTT_API_KEY"


def positive(text: str) -> int:
    """An argparse type: an integer above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def api_key(options: argparse.Namespace) -> str | None:
    """--api-key, else the environment's, which no process list shows."""
    key: str | None = options.api_key
    return key if key is not None else os.environ.get(KEY_VARIABLE)


def is_shown(quiet: bool) -> bool:
    """Whether a progress bar is wanted: somebody must be looking at it."""
    return not quiet and sys.stderr.isatty()
