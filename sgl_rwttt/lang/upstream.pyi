"""Types of what programs see of sglang.lang 0.5.23, which has none.

Members that a class of this package replaces are left out. A test compares names and parameters
with the installed sglang.lang.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self, overload

class SglExpr:
    def __add__(self, other: str | SglExpr) -> SglExpr: ...
    def __radd__(self, other: str | SglExpr) -> SglExpr: ...

class ChoicesSamplingMethod:
    @property
    def requires_unconditional_logprobs(self) -> bool: ...
    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[Any]],
        output_token_logprobs: list[list[Any]],
        unconditional_token_logprobs: list[list[Any]] | None = None,
    ) -> Any: ...

token_length_normalized: ChoicesSamplingMethod
greedy_token_selection: ChoicesSamplingMethod
unconditional_likelihood_normalized: ChoicesSamplingMethod

def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | list[str] | None = None,
    stop_token_ids: list[int] | None = None,
    stop_regex: str | list[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: list[str] | None = None,
    choices_method: ChoicesSamplingMethod | None = None,
    regex: str | None = None,
    json_schema: str | None = None,
) -> SglExpr: ...
def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | list[str] | None = None,
    stop_token_ids: list[int] | None = None,
    stop_regex: str | list[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> SglExpr: ...
def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | list[str] | None = None,
    stop_token_ids: list[int] | None = None,
    stop_regex: str | list[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
) -> SglExpr: ...
def select(
    name: str | None = None,
    choices: list[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod = ...,
) -> SglExpr: ...
def image(expr: str | SglExpr) -> SglExpr: ...
def system(expr: str | SglExpr | None = None) -> SglExpr: ...
def user(expr: str | SglExpr | None = None) -> SglExpr: ...
def assistant(expr: str | SglExpr | None = None) -> SglExpr: ...
def system_begin() -> SglExpr: ...
def system_end() -> SglExpr: ...
def user_begin() -> SglExpr: ...
def user_end() -> SglExpr: ...
def assistant_begin() -> SglExpr: ...
def assistant_end() -> SglExpr: ...

class ProgramState:
    def __init__(self, stream_executor: Any) -> None: ...
    @overload
    def system(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def system(self, expr: str | SglExpr) -> SglExpr: ...
    @overload
    def user(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def user(self, expr: str | SglExpr) -> SglExpr: ...
    @overload
    def assistant(self, expr: None = None) -> AbstractContextManager[None]: ...
    @overload
    def assistant(self, expr: str | SglExpr) -> SglExpr: ...
    def var_scope(self, name: str) -> AbstractContextManager[None]: ...
    def text(self) -> str: ...
    def messages(self) -> list[Any]: ...
    def sync(self) -> None: ...
    def error(self) -> BaseException | None: ...
    def get_var(self, name: str) -> Any: ...
    def set_var(self, name: str, value: Any) -> None: ...
    def get_meta_info(self, name: str) -> Any: ...
    def __iadd__(self, other: str | SglExpr) -> Self: ...
    def __getitem__(self, name: str) -> Any: ...
    def __setitem__(self, name: str, value: Any) -> None: ...
    def __contains__(self, name: str) -> bool: ...

class ProgramStateGroup:
    def __init__(self, states: list[Any], src_state: Any = None) -> None: ...

class SglFunction:
    func: Callable[..., Any]
    bind_arguments: dict[str, Any]
    arg_names: list[str]
    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bind_arguments: dict[str, Any] | None = None,
    ) -> None: ...

class BaseBackend:
    chat_template: Any
    def __init__(self) -> None: ...
    def get_chat_template(self) -> Any: ...
