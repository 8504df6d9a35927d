"""The rule of a server: options that fit it, pools that fit the memory, checkpoints that fit it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from sgl_rwttt.backends.lora_config import DecoderShape, LoraDeltaConfig
from sgl_rwttt.backends.lora_peft import save_adapter
from sgl_rwttt.backends.lora_slots import initial_adapter
from sgl_rwttt.core.errors import InvalidStateRequest
from sgl_rwttt.core.lineage import root_id
from sgl_rwttt.srt_ext.checkpoint import check_adapters
from sgl_rwttt.srt_ext.options import ENV_OPTIONS, TTTOptions, add_arguments, publish_arguments
from sgl_rwttt.srt_ext.rules import lora_configs, state_parts
from sgl_rwttt.srt_ext.runtime import TTTRuntime

MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPE = DecoderShape(2, 32, 4, 2, 8, 56)


def options(**given: Any) -> TTTOptions:
    return TTTOptions(backend="lora_delta", **given)


def test_flags_become_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a flag that is accepted and changes nothing."""
    monkeypatch.delenv(ENV_OPTIONS, raising=False)
    assert lora_configs(options(), MODEL) == (LoraDeltaConfig(SHAPE),)
    flags = "--ttt-backend lora_delta --ttt-targets up_proj,q_proj --ttt-rank 4 --ttt-alpha 4"
    flags += " --ttt-chunk 16 --ttt-lr 0.01 --ttt-tau 2 --ttt-lambda 0.5 --ttt-steps 3 --ttt-seed 9"
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    publish_arguments(parser.parse_args(flags.split()))
    (rule,) = lora_configs(TTTOptions.from_env(), MODEL)
    wanted = LoraDeltaConfig(SHAPE, ("q_proj", "up_proj"), 4, 4.0, 16, 0.01, 2.0, 0.5, 3, 9)
    assert rule == wanted
    assert rule.rule == (
        "lora_delta targets=q_proj,up_proj rank=4 alpha=4.0 chunk=16 lr=0.01 tau=2.0 lambda=0.5 "
        "steps=3 clip=1.0 seed=9"
    )


@pytest.mark.parametrize(
    "given, named",
    [
        ({"rank": 4}, "--ttt-rank needs --ttt-backend=lora_delta"),
        ({"adapter": "x"}, "--ttt-adapter needs --ttt-backend=lora_delta"),
        ({"backend": "adam"}, "--ttt-backend must be one of"),
        ({"backend": "lora_delta", "fold_rows": 3}, "--ttt-fold-rows cannot be combined"),
        ({"backend": "lora_delta", "max_bases": 0}, "--ttt-max-bases cannot be combined"),
        ({"backend": "lora_delta", "commit": "dense"}, "--ttt-commit=dense cannot be combined"),
        ({"backend": "lora_delta", "chunk": 1}, "--ttt-chunk must be at least 2"),
        ({"backend": "lora_delta", "steps": 0}, "--ttt-steps must be at least 1"),
    ],
)
def test_options_of_another_rule(given: dict[str, Any], named: str) -> None:
    """Guards: a flag of one rule that the other ignores."""
    with pytest.raises(ValueError, match=named):
        TTTOptions(**given)


@pytest.mark.parametrize(
    "changes, given, named",
    [
        ({"architectures": ["GemmaForCausalLM"]}, {}, "architecture 'GemmaForCausalLM'"),
        ({"ttt_mode": True}, {}, "cannot be combined with ttt_mode: true"),
        ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, {}, "use_sliding_window is True"),
        ({"num_key_value_heads": 3}, {}, "num_key_value_heads is 3"),
        ({}, {"targets": "q_proj,lm_head"}, "targets is"),
        ({}, {"lr": 0.0}, "lr is 0.0"),
        ({}, {"chunk": 64, "train_tokens": 63}, "--ttt-train-tokens=63 does not hold"),
        ({}, {"adapter": "nowhere"}, "adapter_config.json cannot be read"),
    ],
)
def test_what_cannot_be_served(changes: Any, given: dict[str, Any], named: str) -> None:
    """Guards: an error in the scheduler process, minutes after the start."""
    check_adapters(MODEL, options())
    with pytest.raises(ValueError, match=named):
        check_adapters(MODEL | changes, options(**given))


def test_an_initial_adapter_is_part_of_the_rule(tmp_path: Path) -> None:
    """Guards: two servers with different start adapters that take each other's snapshots."""
    (plain,) = lora_configs(options(), MODEL)
    tensors = initial_adapter(plain, "any")
    rules = {plain.rule}
    for number in range(2):
        tensors["v_proj.lora_B"][0, 0, 0] = number
        save_adapter(tmp_path, tensors, 16.0, "base")
        rules.add(lora_configs(options(adapter=str(tmp_path)), MODEL)[0].rule)
    assert len(rules) == 3


def test_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a second rank that is dropped, shares the first one's root or group, or has no room
    for its start.
    """
    configs = lora_configs(options(rank="8,4"), MODEL)
    assert [config.rank for config in configs] == [8, 4]
    assert lora_configs(options(rank=4), MODEL) == (configs[1],), "as on a server of its own"
    monkeypatch.setenv(ENV_OPTIONS, "{}")
    options(rank="8,4", memory_mb=1).publish()
    runtime = TTTRuntime(configs[0], "of 8", torch.device("cpu"), [(configs[1], "of 4")])
    assert [root.id for root in runtime.roots] == [
        root_id("of 8", configs[0].rule),
        root_id("of 4", configs[1].rule),
    ]
    assert [root.pages for root in runtime.roots] == [(), (runtime.backend.start + 1,)]
    assert len({runtime.forms[runtime.form_of(root.pages)].shape for root in runtime.roots}) == 2
    assert (runtime.form_with(None), runtime.form_with(8), runtime.form_with(4)) == (0, 0, 1)
    with pytest.raises(InvalidStateRequest, match=r"serves no rank 2: it has \[8, 4\]"):
        runtime.form_with(2)
    bytes_held = sum(p.nbytes for pair in runtime.backend.pools.values() for p in pair)
    assert bytes_held - runtime.backend.page_bytes <= 1 << 20
    runtime.store.check_integrity()


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"rank": "8,8"}, "--ttt-rank names a rank twice: 8,8"),
        ({"rank": "8,"}, "--ttt-rank takes numbers from 1, got '8,'"),
        ({"rank": 0}, "--ttt-rank takes numbers from 1, got 0"),
        ({"rank": "8,4", "adapter": "x"}, "--ttt-adapter has one rank"),
    ],
)
def test_ranks_that_cannot_be(given: dict[str, Any], named: str) -> None:
    """Guards: a rank that is found out in the scheduler process, or silently left out."""
    with pytest.raises(ValueError, match=named):
        options(**given)


def test_adapters_fit_the_memory() -> None:
    """Guards: pools larger than the flag says, and a limit whose flag is not the one named."""
    config = LoraDeltaConfig(SHAPE)
    parts = state_parts([config], options(memory_mb=1), torch.device("cpu"))
    bytes_held = sum(p.nbytes for pair in parts.backend.pools.values() for p in pair)
    slot = parts.backend.page_bytes
    assert bytes_held - slot <= 1 << 20 < bytes_held + slot  # slot 0, the dummy, comes on top
    assert (parts.pages.total, parts.pages.flag) == (parts.backend.pages, "--ttt-memory-mb")
    assert (parts.evidence, parts.bases.available, parts.fold_pages) == ("tokens", 0, 0)
    few = state_parts([config], options(max_pages=5), torch.device("cpu"))
    assert (few.pages.available, few.pages.flag) == (5, "--ttt-max-pages")
    wide = LoraDeltaConfig(DecoderShape(32, 4096, 32, 8, 128, 14336), rank=64)
    with pytest.raises(ValueError, match=r"--ttt-memory-mb=64 holds 0 adapters"):
        state_parts([wide], options(memory_mb=64), torch.device("cpu"))
