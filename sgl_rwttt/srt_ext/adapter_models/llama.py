"""Llama-architecture checkpoints with LoRA deltas."""

from sglang.srt.models import llama

from ..adapters import AdapterCausalLM


class LlamaForCausalLM(AdapterCausalLM, llama.LlamaForCausalLM):
    """SGLang's LlamaForCausalLM with an adapter per owner."""


EntryClass = LlamaForCausalLM
