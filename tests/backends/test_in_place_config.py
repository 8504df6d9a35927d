"""The published configuration keys."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_rwttt.backends import backend_class
from sgl_rwttt.backends.in_place import InPlaceBackend, InPlaceConfig
from tests.golden import golden_case, golden_names

GOOD: dict[str, Any] = {
    "ttt_mode": True,
    "ttt_layers": [2, 0],
    "ttt_chunk": 8,
    "ttt_lr": 0.03,
    "ttt_proj": False,
    "ttt_target": "input_embed",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
}


def test_reads_objects_and_mappings() -> None:
    """A key that is read under another name, or layers whose order changes the layer slots."""
    expected = InPlaceConfig((0, 2), 8, 0.03, False, "input_embed", 32, 48)
    assert InPlaceConfig.from_hf(GOOD) == expected
    assert InPlaceConfig.from_hf(SimpleNamespace(**GOOD)) == expected
    assert InPlaceConfig.from_hf(GOOD | {"ttt_lr": 1}).lr == 1.0


@pytest.mark.parametrize("name", golden_names())
def test_reads_published_files(name: str) -> None:
    """A published config.json that is refused."""
    config = golden_case(name).config
    assert InPlaceConfig.from_hf(config).layers == tuple(config["ttt_layers"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ttt_mode", False),
        ("ttt_mode", 1),
        ("ttt_layers", []),
        ("ttt_layers", [0, 0]),
        ("ttt_layers", [4]),
        ("ttt_layers", [-1]),
        ("ttt_layers", [True]),
        ("ttt_layers", "0,2"),
        ("ttt_layers", 2),
        ("ttt_chunk", 0),
        ("ttt_chunk", 8.0),
        ("ttt_chunk", True),
        ("ttt_lr", float("nan")),
        ("ttt_lr", float("inf")),
        ("ttt_lr", "0.1"),
        ("ttt_lr", True),
        ("ttt_proj", 1),
        ("ttt_target", "embeddings"),
        ("ttt_target", ["hidden_states"]),
        ("hidden_act", "gelu"),
        ("hidden_size", 0),
        ("intermediate_size", None),
        ("num_hidden_layers", "4"),
    ],
    ids=str,
)
def test_refuses(key: str, value: Any) -> None:
    """A value that is served as something else than the checkpoint meant."""
    with pytest.raises(ValueError) as caught:
        InPlaceConfig.from_hf(GOOD | {key: value})
    message = str(caught.value)
    assert key in message and repr(value) in message and "allowed: " in message


@pytest.mark.parametrize("key", sorted(GOOD))
def test_refuses_missing(key: str) -> None:
    """A missing key that silently means some default."""
    with pytest.raises(ValueError, match=f"{key} is missing; allowed: "):
        InPlaceConfig.from_hf({k: v for k, v in GOOD.items() if k != key})


def test_rule_names_every_parameter() -> None:
    """Two checkpoints with different rules that share their state ids."""
    changes = {"ttt_layers": [0], "ttt_chunk": 9, "ttt_lr": 0.04, "ttt_proj": True}
    changes["ttt_target"] = "hidden_states"
    rules = {InPlaceConfig.from_hf(GOOD | {k: v}).rule for k, v in changes.items()}
    assert len(rules | {InPlaceConfig.from_hf(GOOD).rule}) == len(changes) + 1


def test_registry() -> None:
    """An unknown rule that means some other, or a registry that costs the torch import."""
    assert backend_class("in_place") is InPlaceBackend
    with pytest.raises(ValueError, match="no update rule named 'dense'; there are in_place"):
        backend_class("dense")
    code = "import sys, sgl_rwttt.backends; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
