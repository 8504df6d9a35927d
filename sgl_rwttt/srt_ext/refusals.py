"""What is not verified with writable state: flags, refused by name at start-up, and messages."""

from __future__ import annotations

from functools import partial
from typing import Any

RADIX_BACKEND = "ttt"

# (ServerArgs field, allowed values, why). A field whose value is not allowed stops the server.
_REFUSED: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("tp_size", (1,), "the MLP output is a partial sum per rank and the state's part is not"),
    ("nnodes", (1,), "verbs and snapshots reach the ranks of one machine"),
    (
        "load_balance_method",
        ("round_robin", "auto", "total_requests", "total_tokens"),
        "it is for disaggregation: every request would have to bring a bootstrap room",
    ),
    ("pp_size", (1,), "a state update spans the layers of one process"),
    ("speculative_algorithm", (None,), "rejected draft tokens would be written into the state"),
    ("disaggregation_mode", ("null",), "the state does not travel with the KV"),
    ("enable_hierarchical_cache", (False,), "KV on the host has no state beside it"),
    ("enable_lmcache", (False,), "KV in LMCache has no state beside it"),
    ("enable_flexkv", (False,), "KV in FlexKV has no state beside it"),
    ("enable_unified_cache_external_linker", (False,), "external KV has no state beside it"),
    ("enable_unified_memory", (False,), "rows may move under their owner"),
    ("enable_hisparse", (False,), "not verified with writable state"),
    ("enable_mixed_chunk", (False,), "prefill and decode owners would share one operator group"),
    ("enable_streaming_session", (False,), "a row would change hands without a release"),
    ("enable_session_radix_cache", (False,), "owners are sessions of the session controller"),
    ("disable_radix_cache", (False,), "forks and rollbacks need the prefix cache"),
    ("enable_dp_attention", (False,), "not verified with writable state"),
    ("enable_torch_compile", (False,), "the state is Python-managed inside the forward pass"),
    ("disable_overlap_schedule", (True,), "a step's state is committed before the next is planned"),
    ("enable_two_batch_overlap", (False,), "one forward pass must see all READs of a step"),
    ("enable_memory_saver", (False,), "released KV would leave its state behind"),
    ("enable_pdmux", (False,), "not verified with writable state"),
    ("enable_lora", (False,), "adapter weights change what a state was computed with"),
    ("quantization", (None,), "not verified with writable state"),
    ("tokenizer_worker_num", (1,), "plugins are not loaded in HTTP workers"),
    ("enable_priority_scheduling", (False,), "preemption is not verified with writable state"),
    ("num_continuous_decode_steps", (1,), "boundaries are committed after every step"),
    ("dllm_algorithm", (None,), "tokens are not consumed in order"),
    ("page_size", (None, 1), "a state point can lie between any two tokens"),
    ("is_embedding", (False,), "an embedding request owns no state"),
    ("cpu_offload_gb", (0,), "not verified with writable state"),
    ("schedule_policy", ("fcfs", "lpm", "lof", "random"), "not verified with writable state"),
    ("radix_cache_backend", (RADIX_BACKEND,), "KV must be reused together with the state"),
)


class RefusedFlag(ValueError):
    """A server flag that a TTT checkpoint cannot be served with."""


def refuse_unsupported(config: Any) -> None:
    """Raise RefusedFlag, naming the flag, its value and the reason, for the first refused field.

    ``config`` is the resolved configuration (attributes named as in ``ServerArgs``).
    """
    for field, allowed, why in _REFUSED:
        value = getattr(config, field)
        if value not in allowed and not (value is None and False in allowed):
            flag = "--" + field.replace("_", "-")
            raise RefusedFlag(
                f"{flag}={value!r} cannot be combined with a TTT checkpoint: {why} "
                f"(allowed: {', '.join(map(repr, allowed))})"
            )


def refused_weight_updates() -> list[tuple[type, Any]]:
    """Handlers that answer every replacement of weights with a refusal.

    A state is a difference from the weights that it was computed with.
    """
    from sglang.srt.managers import io_struct

    message = "weights of a TTT checkpoint cannot be replaced while serving: restart the server"
    kinds = ("UpdateWeightFromDisk", "UpdateWeightsFromDistributed", "UpdateWeightsFromTensor")
    pairs = []
    for kind in (*kinds, "UpdateWeightsFromIPC"):
        output = getattr(io_struct, f"{kind}ReqOutput")
        answer = partial(output, success=False, message=message)
        pairs.append((getattr(io_struct, f"{kind}ReqInput"), lambda _, answer=answer: answer()))
    return pairs
