"""Read-write state for models that keep learning while they answer, served on SGLang.

Names are loaded at their first use, so that importing the package costs neither torch nor SGLang.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ERRORS = (
    "BranchBusy",
    "ForeignOwner",
    "IncompatibleSnapshot",
    "IntegrityError",
    "InvalidStateRequest",
    "LedgerMismatch",
    "OwnerReleased",
    "ReadOnlyState",
    "RollbackBeyondRetention",
    "ServerGone",
    "StaleVersion",
    "StateCapacity",
    "StateError",
    "UnknownOwner",
    "UnknownState",
    "UnsupportedByRule",
    "WriteFailed",
)
_LANG = (
    "Branches",
    "Checkpoint",
    "Engine",
    "Event",
    "Lineage",
    "Program",
    "ProgramFailed",
    "Runtime",
    "Score",
    "SglExpr",
    "State",
    "StateBackend",
    "Trace",
    "TraceLimit",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "greedy_token_selection",
    "image",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "tree",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
)
_HOME = dict.fromkeys(_ERRORS, "sgl_rwttt.core.errors") | dict.fromkeys(_LANG, "sgl_rwttt.lang")

__all__ = ["__version__", *_ERRORS, *_LANG]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from sgl_rwttt.core.errors import *  # noqa: F403
    from sgl_rwttt.lang import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        home = _HOME.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
