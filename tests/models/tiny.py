"""Small random checkpoints with a real tokenizer, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.lang.toy_tokenizer import toy_tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
_KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


def save_tiny(
    folder: Path,
    kind: str = "llama",
    tied: bool = True,
    dtype: torch.dtype = torch.float32,
    shards: str = "5GB",
    **changes: Any,
) -> Any:
    """Write a checkpoint folder; returns the model, in float32."""
    tokenizer = toy_tokenizer(adds_bos=True)
    config_class, model_class = _KINDS[kind]
    torch.manual_seed(3)
    sizes = SIZES | {"vocab_size": len(tokenizer), "tie_word_embeddings": tied} | changes
    model = model_class(config_class(**sizes)).to(dtype)
    with torch.no_grad():  # as far from 1 as in a trained model, so that a forgotten norm shows
        model.model.norm.weight.copy_(torch.linspace(0.2, 2.0, sizes["hidden_size"]))
    model.save_pretrained(folder, max_shard_size=shards)
    tokenizer.save_pretrained(folder)
    return model.float().eval()
