"""An engine with rwttt_cpu answers as one with torch_native: prefill, hits, chunks, decode."""

from __future__ import annotations

from typing import Any

import pytest

from sgl_rwttt.srt_ext.attention import CPU_ATTENTION
from tests.assert_close import assert_close
from tests.engine.served import LOGPROBS, Served, input_logprobs, output_logprobs
from tests.golden import golden_case

pytestmark = pytest.mark.engine
CASE = golden_case("llama_embed_proj")
NEW = 12


def answers(attention: str | None) -> tuple[str, dict[str, Any]]:
    """The backend that the engine took, and its answers to every kind of request."""
    from sglang.srt.arg_groups.overrides import resolved_view

    served = Served(CASE.path, attention_backend=attention, chunked_prefill_size=16)
    try:
        prompt = CASE.prompt_ids
        found: dict[str, Any] = {
            "cold": served.generate(prompt, n=NEW, logprob_start_len=0, **LOGPROBS)
        }
        longer = [*prompt, *found["cold"]["output_ids"], 7, 8, 9]
        found["hit"] = served.generate(longer, n=NEW, **LOGPROBS)
        apart = [[token, *prompt[: 5 + 9 * token]] for token in range(3)]
        siblings = [[*longer, 11], [*longer, 12, 13]]
        batch = [
            served.agenerate(ids, n=NEW, **LOGPROBS) for ids in (*apart, *siblings, longer * 2)
        ]
        found |= {f"batch {i}": answer for i, answer in enumerate(served.run(*batch))}
        return resolved_view(served.engine.server_args).attention_backend, found
    finally:
        served.close()


def test_the_answers_are_torch_natives() -> None:
    """Guards: attention that is right alone and wrong behind SGLang's batches, pools and caches,
    and a CPU engine on a TTT checkpoint that does not take ours by itself."""
    name, ours = answers(None)
    stock_name, stock = answers("torch_native")
    assert (name, stock_name) == (CPU_ATTENTION, "torch_native")
    assert ours["cold"]["output_ids"] == CASE.generated_ids[:NEW]
    assert ours["hit"]["meta_info"]["cached_tokens"] > len(CASE.prompt_ids) // 2
    assert_close(input_logprobs(ours["cold"]), input_logprobs(stock["cold"]), name="prompt")
    for kind, answer in ours.items():
        assert answer["output_ids"] == stock[kind]["output_ids"], kind
        assert_close(output_logprobs(answer), output_logprobs(stock[kind]), 1e-4, kind)
        cached = [found[kind]["meta_info"]["cached_tokens"] for found in (ours, stock)]
        assert cached[0] == cached[1], kind
