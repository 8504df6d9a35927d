"""The LoRA delta rule with PEFT, torch autograd and torch.optim.AdamW: one owner at a time."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

VOCAB = 97

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
}


def tiny_model(architecture: str, **sizes: Any) -> Any:
    """A random float32 model with uneven norms, so that a wrong norm shows."""
    torch.manual_seed(7)
    all_sizes = {**_SIZES, **sizes}
    if architecture == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(**all_sizes, tie_word_embeddings=True))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**all_sizes, head_dim=16, tie_word_embeddings=False))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
            else:
                weight.mul_(4)  # sharper than the usual 0.02
    return model.eval()


class Owner:
    """A PEFT model of its own and the rule, as TLM's authors write it."""

    def __init__(
        self,
        base: Any,
        targets: tuple[str, ...],
        rank: int,
        alpha: float,
        start: dict[str, Tensor],
    ) -> None:
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=list(targets), task_type="CAUSAL_LM"
        )
        self.model: Any = get_peft_model(copy.deepcopy(base), config)
        self.targets = targets
        with torch.no_grad():
            for name, weight in self._adapter():
                layer, key = _place(name)
                weight.copy_(start[key][layer])

    def boundary(
        self, tokens: list[int], lr: float, tau: float, weight: float, steps: int
    ) -> tuple[float, int]:
        """Loss before, steps taken."""
        self.model.train()
        trained = [value for _, value in self._adapter()]
        optimizer = torch.optim.AdamW(trained, lr=lr, weight_decay=0.0)
        ids, first, taken = torch.tensor([tokens]), None, 0
        for _ in range(steps):
            loss = self.model(input_ids=ids, labels=ids).loss
            first = loss.item() if first is None else first
            if loss.item() <= tau:
                break
            optimizer.zero_grad()
            (weight * torch.exp(loss.detach() - tau) * loss).backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            taken += 1
        assert first is not None
        return first, taken

    def tensors(self) -> dict[str, Tensor]:
        """As the backend names them."""
        found: dict[str, dict[int, Tensor]] = {}
        for name, value in self._adapter():
            layer, key = _place(name)
            found.setdefault(key, {})[layer] = value.detach()
        return {
            key: torch.stack([parts[i] for i in range(len(parts))]) for key, parts in found.items()
        }

    @torch.no_grad()
    def feed(self, token: int, cache: Any) -> tuple[Tensor, Any]:
        """One token under the present adapter: logits [vocab], cache."""
        answer = self.model.eval()(
            input_ids=torch.tensor([[token]]), past_key_values=cache, use_cache=True
        )
        return answer.logits[0, -1], answer.past_key_values

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """[T, vocab]"""
        logits: Tensor = self.model.eval()(input_ids=torch.tensor([tokens])).logits[0]
        return logits

    def _adapter(self) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in self.model.named_parameters() if ".lora_" in name]


def _place(name: str) -> tuple[int, str]:
    parts = name.split(".")
    at = next(i for i, part in enumerate(parts) if part.startswith("lora_"))
    return int(parts[parts.index("layers") + 1]), f"{parts[at - 1]}.{parts[at]}"
