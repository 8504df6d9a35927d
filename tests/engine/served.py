"""A real SGLang engine under test: raw requests by token ids, concurrent ones, control verbs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sgl_rwttt.srt_ext.launch import prepare_environment
from tests.engine.preloaded import forking
from tests.engine.server import free_port

LOGPROB_TOLERANCE = 1e-4  # absolute
GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Served:
    """One engine on a TTT checkpoint without tokenizer; float32, one thread."""

    def __init__(self, model_path: Path | str, **options: Any) -> None:
        from sgl_rwttt.srt_ext.options import TTTOptions

        prepare_environment()
        state = {k: options.pop(k) for k in list(options) if k.startswith("ttt_")}
        TTTOptions.from_mapping({"ttt_memory_mb": 64, **state}).publish()
        import sglang

        with forking():
            self.engine = sglang.Engine(
                **{
                    "model_path": str(model_path),
                    "skip_tokenizer_init": True,
                    "device": "cpu",
                    "dtype": "float32",
                    "max_total_tokens": 4096,
                    "max_running_requests": 16,
                    "sleep_on_idle": True,
                    "port": free_port(),  # internal ports follow from it; tests run side by side
                    **options,
                }
            )

    def close(self) -> None:
        with forking():
            self.engine.shutdown()

    def run(self, *coroutines: Any) -> list[Any]:
        """Run coroutines together; their results in order."""

        async def together() -> list[Any]:
            return await asyncio.gather(*coroutines)

        return list(self.engine.loop.run_until_complete(together()))

    async def agenerate(self, ids: Sequence[int], delay: float = 0.0, **options: Any) -> Any:
        """One request. Options: n (new tokens), owner, parent, offset, custom, sampling, rest."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        await asyncio.sleep(delay)
        payload = request(ids, **options)
        stream = self.engine.tokenizer_manager.generate_request(GenerateReqInput(**payload), None)
        return await anext(aiter(stream))

    def generate(self, ids: Sequence[int], **options: Any) -> Any:
        return self.run(self.agenerate(ids, **options))[0]

    def control(self, op: str, **args: Any) -> dict[str, Any]:
        from sgl_rwttt.srt_ext.control import control

        return self.run(control(self.engine.tokenizer_manager, op, args))[0]

    def open(self) -> str:
        return str(self.control("open")["owner"])

    def info(self) -> dict[str, Any]:
        return self.control("info")

    def flush(self) -> None:
        """Empty the caches; waits for the last answer's batch, which SGLang takes apart later."""
        answer = self.run(self.engine.tokenizer_manager.flush_cache(timeout_s=30))[0]
        assert answer.success, "the caches were not flushed"


def request(
    ids: Sequence[int],
    *,
    n: int = 0,
    rid: str | None = None,
    owner: str | None = None,
    parent: str | None = None,
    offset: int | None = None,
    custom: dict[str, Any] | None = None,
    sampling: dict[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    """A /generate payload for token ids."""
    payload: dict[str, Any] = {
        "input_ids": list(ids),
        "rid": rid or uuid.uuid4().hex,
        "sampling_params": {
            **GREEDY,
            "max_new_tokens": n,
            "custom_params": custom,
            **(sampling or {}),
        },
        **rest,
    }
    if owner is not None:
        payload["session_params"] = {"id": owner, "rid": parent, "offset": offset}
    return payload


def state(answer: dict[str, Any]) -> dict[str, Any]:
    """The state report of an answer."""
    report: dict[str, Any] = answer["meta_info"]["state"]
    return report


def rid(answer: dict[str, Any]) -> str:
    return str(answer["meta_info"]["id"])


LOGPROBS: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 128}


def output_logprobs(answer: dict[str, Any]) -> Tensor:
    """[outputs, 128] log-probabilities over the whole (128-token) vocabulary."""
    return _dense(answer["meta_info"]["output_top_logprobs"])


def input_logprobs(answer: dict[str, Any]) -> Tensor:
    """[inputs - 1, 128]: row i is the distribution after token i of the scored region."""
    return _dense([row for row in answer["meta_info"]["input_top_logprobs"] if row])


def _dense(rows: list[list[tuple[float, int, Any]]]) -> Tensor:
    table = torch.full((len(rows), 128), float("nan"))
    for i, row in enumerate(rows):
        for value, token, _text in row:
            table[i, token] = value
    return table


def assert_equal_logprobs(got: Tensor, expected: Tensor, what: str) -> None:
    """Within 1e-4, absolute, in float32."""
    assert got.shape == expected.shape, what
    assert not got.isnan().any(), f"{what}: vocabulary rows are missing"
    worst = (got - expected).abs().max().item()
    assert worst < LOGPROB_TOLERANCE, f"{what}: off by {worst:.2e}"
