"""A TTT checkpoint that cannot be served is refused before anything starts, by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_rwttt.srt_ext.checkpoint import check_checkpoint, is_ttt, read_config
from tests.golden import golden_case, golden_names

CONV, PROJ = "model.layers.0.mlp.ttt_conv.weight", "model.layers.2.mlp.ttt_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = golden_case("llama_embed_proj").path
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, tmp_path / name)
    return tmp_path


def check(folder: Path, **changes: Any) -> Any:
    config = {**read_config(str(folder)), **changes}
    return check_checkpoint(str(folder), {k: v for k, v in config.items() if v is not None})


@pytest.mark.parametrize("name", golden_names())
def test_published_checkpoints_pass(name: str) -> None:
    """Guards: a check stricter than the published format."""
    path = str(golden_case(name).path)
    assert is_ttt(read_config(path))
    check_checkpoint(path, read_config(path))


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"ttt_layers": [0, 9]}, "ttt_layers"),
        ({"ttt_layers": None}, "ttt_layers"),
        ({"ttt_chunk": 0}, "ttt_chunk"),
        ({"ttt_lr": "fast"}, "ttt_lr"),
        ({"ttt_target": "labels"}, "ttt_target"),
        ({"ttt_proj": 1}, "ttt_proj"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"ttt_proj": False}, "ttt_proj"),
        ({"ttt_layers": [0, 1]}, "model.layers.1.mlp.ttt_conv.weight"),
    ],
)
def test_bad_config_is_refused_by_key(folder: Path, changes: dict[str, Any], named: str) -> None:
    """Guards: a wrong key that silently serves another rule."""
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        check(folder, **changes)


def rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    "name, tensor",
    [
        (CONV, None),
        (PROJ, None),
        (CONV, torch.zeros(32, 1, 4)),
        (PROJ, torch.zeros(32, 48)),
        ("model.layers.1.mlp.ttt_conv.weight", torch.zeros(32, 1, 5)),
    ],
)
def test_bad_weights_are_refused_by_name(
    folder: Path, name: str, tensor: torch.Tensor | None
) -> None:
    """Guards: SGLang only warns about a missing parameter and serves wrong answers."""
    rewrite(folder, **{name: tensor})
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        check(folder)


def test_a_broken_file_is_refused(folder: Path) -> None:
    """Guards: a truncated download found out after minutes of loading."""
    (folder / "model.safetensors").write_bytes(b"\x01\x02\x03")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        check(folder)


def test_ttt_mode_is_a_boolean(folder: Path) -> None:
    """Guards: `"ttt_mode": "false"` taken for true."""
    with pytest.raises(ValueError, match="ttt_mode"):
        is_ttt({"ttt_mode": "false"})
    assert not is_ttt({})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    assert not is_ttt(read_config(str(folder), '{"ttt_mode": false}'))
