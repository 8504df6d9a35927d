"""The frontend: programs that fork, roll back, freeze and adapt the state of a served model.

Importing this package imports sglang.lang, and with it torch, but nothing of a server.
"""

from .answer import Score
from .backend import StateBackend
from .branches import Branches
from .checkpoint import Checkpoint
from .engine import Engine
from .history import Event
from .http import Runtime
from .ledger import Lineage
from .program import Program, ProgramFailed, function, set_default_backend
from .state import State
from .trace import Trace, TraceLimit
from .tree import tree, tree_of
from .upstream import (
    SglExpr,
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    greedy_token_selection,
    image,
    select,
    system,
    system_begin,
    system_end,
    token_length_normalized,
    unconditional_likelihood_normalized,
    user,
    user_begin,
    user_end,
)

__all__ = [
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
    "token_length_normalized",
    "tree",
    "tree_of",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]
