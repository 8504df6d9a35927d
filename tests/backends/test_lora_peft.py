"""Adapter folders: what we write PEFT reads, what PEFT writes we read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from sgl_rwttt.backends.lora_peft import AdapterError, adapter_digest, load_adapter, save_adapter
from tests.backends.lora_oracle import tiny_model
from tests.backends.lora_rig import Reads, make_backend
from tests.backends.test_lora_delta import CHUNK, ids, learn, logits, segment

RULE: dict[str, Any] = {"chunk": CHUNK, "lr": 0.02, "targets": ("q_proj", "v_proj", "up_proj")}


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_export_and_import(architecture: str, tmp_path: Path) -> None:
    """Guards names, scale and orientation: the same logits here and in PEFT, both ways."""
    model = tiny_model(architecture)
    backend = make_backend(model, **RULE)
    learn(backend, (), 3, ids(CHUNK, 2))
    tokens = ids(11, 3)
    ours = logits(model, backend, tokens, segment(0, 11, (3,)))
    save_adapter(tmp_path / "ours", backend.adapter(Reads(3)), 16.0, "tiny")

    theirs = PeftModel.from_pretrained(tiny_model(architecture), tmp_path / "ours")
    with torch.no_grad():
        found = theirs(input_ids=torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, found, rtol=1e-4, atol=1e-4)

    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            if ".lora_" in name:
                weight.mul_(1.5)
        found = theirs(input_ids=torch.tensor([tokens])).logits[0]
    theirs.save_pretrained(tmp_path / "theirs")
    adapter = load_adapter(tmp_path / "theirs", backend.config)
    backend.set_start(adapter)
    read = logits(model, backend, tokens, segment(0, 11, ()))
    torch.testing.assert_close(read, found, rtol=1e-4, atol=1e-4)
    assert adapter_digest(adapter) != adapter_digest(backend.adapter(Reads(3)))


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    """Guards the import: the file and the key are named, whatever is wrong."""
    model = tiny_model("llama")
    config = make_backend(model, **RULE).config

    def saved(name: str, **lora: Any) -> Path:
        settings = {"r": 8, "lora_alpha": 16, "target_modules": list(config.targets)} | lora
        get_peft_model(tiny_model("llama"), LoraConfig(**settings)).save_pretrained(tmp_path / name)
        return tmp_path / name

    cases = {
        "rank": ({"r": 4}, "r is 4, the rule's is 8"),
        "alpha": ({"lora_alpha": 8}, "lora_alpha is 8, the rule's is 16"),
        "more": ({"target_modules": ["q_proj", "v_proj", "up_proj", "k_proj"]}, "is of no target"),
        "less": ({"target_modules": ["q_proj", "v_proj"]}, "up_proj.lora_A.weight is missing"),
        "layers": ({"layers_to_transform": [0]}, "layers.1.*is missing"),
        "rslora": ({"use_rslora": True}, "use_rslora is True"),
        "dora": ({"use_dora": True}, "use_dora is True"),
        "bias": ({"bias": "all"}, "bias is 'all'"),
        "pattern": ({"rank_pattern": {"q_proj": 2}}, "rank_pattern is"),
    }
    for name, (lora, message) in cases.items():
        with pytest.raises(AdapterError, match=message):
            load_adapter(saved(name, **lora), config)
    with pytest.raises(AdapterError, match=r"adapter_config.json cannot be read"):
        load_adapter(tmp_path / "nothing", config)
    folder = saved("broken")
    load_adapter(folder, config)
    (folder / "adapter_model.safetensors").write_bytes(b"no")
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors cannot be read"):
        load_adapter(folder, config)
    (folder / "adapter_config.json").write_text(json.dumps([]))
    with pytest.raises(AdapterError, match="it is not an object"):
        load_adapter(folder, config)


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """Guards every owner's start: a NaN in the folder would be a NaN in each of them."""
    backend = make_backend(tiny_model("llama"), **RULE)
    tensors = backend.adapter(Reads())
    tensors["v_proj.lora_B"][1, 2, 3] = torch.nan
    save_adapter(tmp_path, tensors, 16.0, "tiny")
    with pytest.raises(AdapterError, match=r"layers.1.self_attn.v_proj.lora_B.*not finite"):
        load_adapter(tmp_path, backend.config)
