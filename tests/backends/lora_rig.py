"""A LoRA backend over a tiny Hugging Face model, and segments made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sgl_rwttt.backends.lora_config import DecoderShape, LoraDeltaConfig
from sgl_rwttt.backends.lora_decoder import DecoderWeights, LayerWeights, Linear
from sgl_rwttt.backends.lora_delta import LoraDeltaBackend, LoraPlan
from sgl_rwttt.backends.lora_slots import initial_adapter
from sgl_rwttt.core.segment import BlockPart, Segment

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def fused_weights(model: Any) -> DecoderWeights:
    """The model's weights, projections joined as SGLang keeps them."""
    shape = DecoderShape.from_hf(model.config)
    positions = torch.arange(model.config.max_position_embeddings)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    return DecoderWeights(
        shape=shape,
        embed=model.model.embed_tokens.weight,
        layers=tuple(_layer(layer) for layer in model.model.layers),
        norm=model.model.norm.weight,
        head=model.lm_head.weight,
        rotary=torch.cat((cos[0, :, :half], sin[0, :, :half]), -1),
        eps=model.config.rms_norm_eps,
        vocab=model.config.vocab_size,
    )


def _layer(layer: Any) -> LayerWeights:
    attn, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=Linear(torch.cat([attn.q_proj.weight, attn.k_proj.weight, attn.v_proj.weight])),
        o=Linear(attn.o_proj.weight),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=Linear(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])),
        down=Linear(mlp.down_proj.weight),
        q_norm=attn.q_norm.weight if hasattr(attn, "q_norm") else None,
        k_norm=attn.k_norm.weight if hasattr(attn, "k_norm") else None,
    )


def make_backend(
    model: Any,
    *,
    slots: int = 24,
    train_tokens: int = 4096,
    ranks: Sequence[int] = (8,),
    **rule: Any,
) -> LoraDeltaBackend:
    """A backend with every free slot poisoned, at its fresh start adapter of each rank."""
    shape = DecoderShape.from_hf(model.config)
    config, *others = [LoraDeltaConfig(shape, **{"rank": rank, **rule}) for rank in ranks]
    backend = LoraDeltaBackend(config, slots=slots, train_tokens=train_tokens, others=others)
    backend.set_weights(fused_weights(model))
    for each in backend.configs:
        backend.set_start(initial_adapter(each, "tiny"))
    for slot in range(slots):
        backend.poison(slot)
    return backend


def segment(
    start: int,
    rows: int,
    reads: tuple[int, ...],
    blocks: Sequence[tuple[int, int, Sequence[int]]] = (),
) -> Segment:
    """Rows that read slot ``reads``; ``blocks`` are (row after which, slot, evidence)."""
    parts, at, pages = [], 0, reads
    for end, slot, _ in blocks:
        last = end == rows
        parts.append(BlockPart(at, end - at, True, slot, 0, True, last, None, pages))
        at, pages = end, (slot,)
    if at < rows:
        parts.append(BlockPart(at, rows - at, True, 0, 0, False, False, None, pages))
    evidence = tuple(tuple(tokens) for _, _, tokens in blocks)
    return Segment(start, rows, None, reads, tuple(parts), evidence)


class Reads:
    """What names a version's memory."""

    base = None

    def __init__(self, *pages: int) -> None:
        self.pages = pages


@contextmanager
def reading(model: Any, backend: LoraDeltaBackend, plan: LoraPlan) -> Iterator[None]:
    """Within it, a [1, N] forward of the base model adds the state's part of each projection."""
    handles = []
    for index, layer in enumerate(model.model.layers):
        for target in backend.config.targets:
            module = getattr(layer.self_attn if target in ATTENTION else layer.mlp, target)

            def add(
                _: Any, args: Any, out: Tensor, index: int = index, target: str = target
            ) -> Tensor:
                return out + backend.read(plan, index, target, args[0][0])[None]

            handles.append(module.register_forward_hook(add))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
