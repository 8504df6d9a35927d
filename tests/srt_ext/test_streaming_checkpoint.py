"""A TTT-Linear checkpoint is known by its model type and refused by name before anything starts."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_rwttt.backends.streaming_config import DEFAULTS, StreamingConfig
from sgl_rwttt.srt_ext.checkpoint import check_checkpoint, is_ttt, read_config
from sgl_rwttt.srt_ext.options import TTTOptions
from sgl_rwttt.srt_ext.rules import size_pools
from sgl_rwttt.srt_ext.streaming_config import TTTConfig, published
from tests.golden_streaming import NAMES, streaming_case

NORM = "model.layers.1.seq_modeling_block.post_norm.bias"
W1 = "model.layers.0.seq_modeling_block.W1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = streaming_case("ttt_linear_full").path
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, tmp_path / name)
    return tmp_path


def check(folder: Path, **changes: Any) -> Any:
    return check_checkpoint(str(folder), {**read_config(str(folder)), **changes})


def rewrite(folder: Path, **tensors: torch.Tensor | None) -> None:
    weights = {**load_file(folder / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_published_checkpoints_pass(name: str) -> None:
    """Guards: a check stricter than the published format; a family that is not recognised."""
    path = str(streaming_case(name).path)
    assert is_ttt(read_config(path))
    assert isinstance(check_checkpoint(path, read_config(path)), StreamingConfig)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ttt_layer_type": "mlp"}, "ttt_layer_type"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"share_qk": False}, r"model\.layers\.0\.seq_modeling_block\.k_proj"),
        ({"pre_conv": False}, r"model\.layers\.0\.conv\."),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\."),
        ({"mini_batch_size": 8}, "learnable_token_idx"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    folder: Path, changes: dict[str, Any], named: str
) -> None:
    """Guards: a wrong key that silently serves another rule."""
    with pytest.raises(ValueError, match=named):
        check(folder, **changes)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [(NORM, None), (W1, torch.zeros(2, 16, 8)), ("model.layers.0.more.weight", torch.zeros(2))],
)
def test_bad_weights_are_refused_by_name(
    folder: Path, name: str, tensor: torch.Tensor | None
) -> None:
    """Guards: a parameter that keeps its first value because the checkpoint lacks it."""
    rewrite(folder, **{name: tensor})
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        check(folder)


def test_derived_tensors_are_ignored(folder: Path) -> None:
    """Guards: older checkpoints with rotary tables, tied ones with a copy of the embedding."""
    rewrite(folder, **{"model.layers.0.seq_modeling_block.rotary_emb.inv_freq": torch.ones(8)})
    check(folder)
    check(folder, tie_word_embeddings=True)


def test_sizes_are_read_as_published() -> None:
    """Guards: an MLP of the size that SGLang pads configurations to on the CPU."""
    case = streaming_case("ttt_linear_full")
    config = TTTConfig(**case.config)
    config.original_intermediate_size, config.intermediate_size = config.intermediate_size, 64
    assert StreamingConfig.from_hf(published(config)) == StreamingConfig.from_hf(case.config)
    assert published(TTTConfig()) == DEFAULTS


def test_pools_have_a_version_per_page() -> None:
    """Guards: memory for pages alone, so that versions would become chains."""
    config = StreamingConfig.from_hf(streaming_case("ttt_linear_full").config)
    pages, bases = size_pools(config, TTTOptions(memory_mb=4))
    assert abs(pages - bases) <= 2
    assert pages * config.page_bytes + bases * config.base_bytes <= (4 << 20) + 100_000
