"""The frontend: programs that fork, roll back, freeze and adapt the state of a served model.

Importing this package imports sglang.lang, but neither torch nor a server.
"""

from sglang.lang.api import (
    assistant,
    assistant_begin,
    assistant_end,
    gen,
    gen_int,
    gen_string,
    image,
    select,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from sglang.lang.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)

from .answer import Score
from .backend import StateBackend
from .branches import Branches
from .checkpoint import Checkpoint
from .engine import Engine
from .http import Runtime
from .ledger import Lineage
from .program import Program, ProgramFailed, function, set_default_backend
from .state import State

__all__ = [
    "Branches",
    "Checkpoint",
    "Engine",
    "Lineage",
    "Program",
    "ProgramFailed",
    "Runtime",
    "Score",
    "State",
    "StateBackend",
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
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]
