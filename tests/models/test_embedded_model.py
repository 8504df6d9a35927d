"""The converted embedded model itself. The first run on a machine converts it (about 15 s)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sgl_rwttt.models.embedded import ensure, find_gguf
from sgl_rwttt.srt_ext.checkpoint import check_checkpoint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure(progress=False)


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_second_call_only_looks(folder: Path) -> None:
    """Every start converts again."""
    start = time.perf_counter()
    assert ensure() == folder
    assert time.perf_counter() - start < 0.5


def test_the_server_accepts_it(folder: Path) -> None:
    """The converter writes a key or a shape that the start-up check refuses."""
    config = read_config(folder)
    rule = check_checkpoint(str(folder), config)
    assert (rule.layers, rule.chunk, rule.d_model, rule.d_ff) == ((24, 25, 26), 32, 576, 1536)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"


def test_projection_removes_what_tokens_share(folder: Path) -> None:
    """The background of all tokens is written into the weights and drowns the association."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        mean = file.get_tensor("model.embed_tokens.weight").double().mean(0)
        proj = file.get_tensor("model.layers.25.mlp.ttt_proj.weight").double()
        conv = file.get_tensor("model.layers.25.mlp.ttt_conv.weight")
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"F32"}  # noqa: SIM118
    assert (mean @ proj).norm() < 1e-5 * mean.norm() * proj.norm()
    assert torch.linalg.matrix_rank(proj, rtol=1e-5) == 574
    assert conv[11, 0].tolist() == [-0.25, -0.25, -0.25, 1.0, -0.25]


def test_base_equals_transformers_reader(folder: Path, tmp_path: Path) -> None:
    """Rows of q and k in GGUF's order, a norm forgotten: fluent nonsense, found late."""
    gguf = find_gguf()
    reader = {"gguf_file": gguf.name, "local_files_only": True}
    oracle = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **reader)
    expected = dict(oracle.state_dict())
    expected.pop("lm_head.weight")  # tied
    found = load_file(folder / "model.safetensors")
    assert {name for name in found if ".ttt_" not in name} == set(expected)
    differing = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert differing == []
    config = read_config(folder)
    theirs = oracle.config.to_dict()
    ours = {key: config[key] for key in config if key in theirs and key != "architectures"}
    assert ours == {key: theirs[key] for key in ours}


def test_tokenizer_round_trip(folder: Path) -> None:
    """Digits merged with a space (as transformers' reader does), or a special token split up."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "<|im_start|>user\nIn 1987 été  cost\t12.50 🎉<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert (ids[0], ids[-2]) == (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.convert_ids_to_tokens(tokenizer("a 19")["input_ids"]) == ["a", "Ġ", "1", "9"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
