"""From sglang.lang's sampling parameters to those of SGLang's native endpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.lang.ir import (
    REGEX_BOOL,
    REGEX_FLOAT,
    REGEX_INT,
    REGEX_STR,
    SglSamplingParams,
)

from sgl_rwttt.core.errors import InvalidStateRequest

from .transport import Json

FIELDS = tuple(f.name for f in dataclasses.fields(SglSamplingParams))
_REGEX = {"int": REGEX_INT, "float": REGEX_FLOAT, "str": REGEX_STR, "bool": REGEX_BOOL}
# Fields beside the sampling parameters, with SGLang's defaults.
REQUEST_FIELDS: Json = {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}

# All ids must come back as sampled: the client trims stops from text and lineage together.
COMPLETE = {
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}
CONSUME: Json = {"max_new_tokens": 0, "temperature": 0.0, **COMPLETE}


def check_single(n: int | None) -> None:
    """Refuse n > 1: parallel samples of one request would have no branch of their own."""
    if n is not None and n != 1:
        raise InvalidStateRequest(
            f"gen(n={n}) is refused: every sample needs a branch of its own, say s.fork({n})"
        )


def stops_of(params: SglSamplingParams) -> list[str]:
    """Stop strings as a list."""
    return [params.stop] if isinstance(params.stop, str) else list(params.stop or ())


def lower(params: SglSamplingParams) -> tuple[Json, Json, list[str]]:
    """(sampling_params, request fields, stop strings) of a gen."""
    check_single(params.n)
    stops = stops_of(params)
    sampling: Json = dict(params.to_srt_kwargs())
    if params.dtype is not None:
        name = _dtype_name(params.dtype)
        sampling["regex"] = _REGEX[name]
        if name in ("int", "float"):
            stops = [*stops, " ", "\n"]
    sampling.update(
        COMPLETE,
        stop=stops,
        stop_token_ids=list(params.stop_token_ids or ()),
        stop_regex=_listed(params.stop_regex),
    )
    fields = {k: v for k in REQUEST_FIELDS if (v := getattr(params, k)) is not None}
    return sampling, fields, stops


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _dtype_name(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", "")
    if name not in _REGEX:
        raise InvalidStateRequest(f"gen(dtype={dtype!r}): must be one of {', '.join(_REGEX)}")
    return str(name)
