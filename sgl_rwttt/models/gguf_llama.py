"""A llama-architecture GGUF file as a Hugging Face checkpoint.

The file is parsed once and read with the ``gguf`` package alone: transformers' own reader gives the
same weights (a test compares them), but parses the file three times and needs accelerate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from .checkpoint import Checkpoint, json_text

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # value of tokenizer.ggml.token_type for special tokens


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Parse the file; raises ValueError for another architecture or tokenizer than SmolLM2's."""
    reader = gguf.GGUFReader(path)
    for key, expected in (
        ("general.architecture", "llama"),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
    ):
        found = reader.fields[key].contents() if key in reader.fields else None
        if found != expected:
            raise ValueError(f"{path.name}: {key} is {found!r}, expected {expected!r}")
    return reader


def read_checkpoint(reader: gguf.GGUFReader) -> Checkpoint:
    """Config, weights and tokenizer of an opened file; ValueError for a tensor of another model."""
    config = _config(reader)
    tokenizer, tokenizer_config = _tokenizer(reader)
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    files: dict[str, str | Path] = {
        "generation_config.json": json_text({key: config[key] for key in ids}),
        "tokenizer_config.json": json_text(tokenizer_config),
        "chat_template.jinja": str(_value(reader, "tokenizer.chat_template")),
        "tokenizer.json": tokenizer.to_str(pretty=True),
    }

    def encode(text: str, special: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)

    return Checkpoint(config, _weights(reader, config), encode, files, "float32")


def _value(reader: gguf.GGUFReader, key: str) -> Any:
    return reader.fields[key].contents()


def _config(reader: gguf.GGUFReader) -> dict[str, Any]:
    heads = int(_value(reader, "llama.attention.head_count"))
    hidden = int(_value(reader, "llama.embedding_length"))
    names = {tensor.name for tensor in reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(_value(reader, "llama.feed_forward_length")),
        "num_hidden_layers": int(_value(reader, "llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(_value(reader, "llama.attention.head_count_kv")),
        "head_dim": hidden // heads,
        "max_position_embeddings": int(_value(reader, "llama.context_length")),
        "rms_norm_eps": float(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(_value(reader, "llama.rope.freq_base")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(_value(reader, "llama.rope.freq_base")),
        },
        "tie_word_embeddings": "output.weight" not in names,
        "vocab_size": int(_value(reader, "llama.vocab_size")),
        "bos_token_id": int(_value(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_value(reader, "tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(_value(reader, "tokenizer.ggml.padding_token_id")),
        "use_cache": True,
    }


def _hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``, else ValueError."""
    try:
        if not name.startswith("blk."):
            stem, _, kind = name.rpartition(".")
            return f"{_TENSORS[stem]}.{kind}"
        _, layer, stem, kind = name.split(".")
        return f"model.layers.{layer}.{_BLOCK_TENSORS[stem]}.{kind}"
    except (KeyError, ValueError) as error:
        raise ValueError(f"tensor {name!r} does not belong to a plain llama model") from error


def _weights(reader: gguf.GGUFReader, config: dict[str, Any]) -> dict[str, Tensor]:
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, Tensor] = {}
    for entry in reader.tensors:
        array = gguf.dequantize(entry.data, entry.tensor_type).astype(np.float32)
        tensor = torch.from_numpy(array)
        stem = entry.name.split(".")[-2]
        if stem in heads:
            tensor = _half_split_rotary(tensor, heads[stem])
        weights[_hugging_face_name(entry.name)] = tensor
    return weights


def _half_split_rotary(weight: Tensor, heads: int) -> Tensor:
    """Undo GGUF's row order of q and k: rotary pairs side by side instead of in two halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _tokenizer(reader: gguf.GGUFReader) -> tuple[Tokenizer, dict[str, Any]]:
    """The byte-level BPE tokenizer of the SmolLM family: digits are split one by one."""
    tokens: list[str] = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ", 1)) for pair in _value(reader, "tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _value(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    roles = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {
        f"{role}_token": tokens[int(_value(reader, f"tokenizer.ggml.{key}_token_id"))]
        for role, key in roles.items()
    }
    return tokenizer, {
        **named,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": int(_value(reader, "llama.context_length")),
        "clean_up_tokenization_spaces": False,
    }
