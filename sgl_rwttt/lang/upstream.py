"""What programs see of sglang.lang, unchanged; upstream.pyi beside this file gives it types."""

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
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.choices import (
    ChoicesSamplingMethod,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sglang.lang.interpreter import ProgramState, ProgramStateGroup
from sglang.lang.ir import SglExpr, SglFunction

__all__ = [
    "BaseBackend",
    "ChoicesSamplingMethod",
    "ProgramState",
    "ProgramStateGroup",
    "SglExpr",
    "SglFunction",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "gen",
    "gen_int",
    "gen_string",
    "greedy_token_selection",
    "image",
    "select",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]
