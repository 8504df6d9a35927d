"""Qwen3-architecture TTT checkpoints."""

from sglang.srt.models import qwen3

from ..fast_weights import FastWeightCausalLM


class Qwen3ForCausalLM(FastWeightCausalLM, qwen3.Qwen3ForCausalLM):
    """SGLang's Qwen3ForCausalLM with In-Place TTT fast weights at ``ttt_layers``."""


EntryClass = Qwen3ForCausalLM
