"""Qwen3-architecture checkpoints with LoRA deltas."""

from sglang.srt.models import qwen3

from ..adapters import AdapterCausalLM


class Qwen3ForCausalLM(AdapterCausalLM, qwen3.Qwen3ForCausalLM):
    """SGLang's Qwen3ForCausalLM with an adapter per owner."""


EntryClass = Qwen3ForCausalLM
