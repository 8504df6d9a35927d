"""TTT-Linear language models in SGLang: every layer's memory is the owner's state, none has KV."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessor
from torch import nn

from sgl_rwttt.backends.streaming_config import StreamingConfig
from sgl_rwttt.backends.streaming_model import PlannedStep, StreamingModel

from .fingerprint import Recorder
from .runtime import TTTRuntime
from .step import forward_step
from .streaming_checkpoint import check_streaming_weights, is_derived
from .streaming_config import published


class StreamingCausalLM(nn.Module):
    """A TTTForCausalLM; owns the state runtime (``ttt``).

    SGLang sizes its KV pool from ``start_layer`` and ``end_layer``: no layer, so no KV. A token's
    slot in that pool is an index alone.
    """

    start_layer = 0
    end_layer = 0

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.ttt_config = StreamingConfig.from_hf(published(config))
        self.ttt: TTTRuntime | None = None
        self.model = StreamingModel(self.ttt_config)
        self.lm_head: nn.Module = self.model.embed_tokens
        if not self.ttt_config.tied:
            self.lm_head = nn.Linear(self.ttt_config.d_model, self.ttt_config.vocab, bias=False)
        self.logits_processor = LogitsProcessor(config)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the checkpoint and start the runtime; returns the names of the parameters.

        Raises CheckpointError naming a tensor that is missing, misshapen or unknown.
        """
        seen = Recorder(weights, lambda name: not is_derived(name, self.ttt_config))
        parameters = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in seen:
                own = parameters.get(name)
                if name in seen.shapes and own is not None and own.shape == tensor.shape:
                    own.copy_(tensor)
        check_streaming_weights(seen.shapes, self.ttt_config)
        self.ttt = TTTRuntime(
            self.ttt_config, seen.fingerprint(self.ttt_config), self.model.norm.weight.device
        )
        self.model.hand_over(self.ttt.backend)
        return set(parameters)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: Any) -> Any:
        """Logits of the batch, inside one step of the state runtime.

        A token's place is its offset in the owner's mini-batch; ``positions`` are not used.
        """
        assert self.ttt is not None
        backend = self.ttt.backend
        with forward_step(self.ttt, forward_batch) as step:
            plan = backend.begin_step(()) if step is None else step.plan
            hidden = self.model(input_ids, PlannedStep(backend, plan))
            return self.logits_processor(input_ids, hidden, self.lm_head, forward_batch)
