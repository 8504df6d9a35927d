"""Llama-architecture TTT checkpoints."""

from sglang.srt.models import llama

from ..fast_weights import FastWeightCausalLM


class LlamaForCausalLM(FastWeightCausalLM, llama.LlamaForCausalLM):
    """SGLang's LlamaForCausalLM with In-Place TTT fast weights at ``ttt_layers``."""


EntryClass = LlamaForCausalLM
