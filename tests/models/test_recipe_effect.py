"""What the recipe is for, measured with an eager loop that shares no code with the package."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import conv1d, cross_entropy
from transformers import AutoTokenizer, LlamaForCausalLM

from sgl_rwttt.models.embedded import ensure

pytestmark = pytest.mark.slow
LENGTH = 448


class EagerInPlace:
    """In-Place TTT as published: a forward of one chunk, then W <- W + lr * V^T H."""

    def __init__(self) -> None:
        folder = ensure(progress=False)
        self.model: Any = LlamaForCausalLM.from_pretrained(folder).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.weights = load_file(folder / "model.safetensors")
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.down = {n: self.model.model.layers[n].mlp.down_proj for n in self.config["ttt_layers"]}
        self.initial = {n: linear.weight.detach().clone() for n, linear in self.down.items()}
        self.hidden: dict[int, Tensor] = {}
        for n, linear in self.down.items():
            linear.register_forward_pre_hook(self._keep(n))

    def _keep(self, layer: int) -> Any:
        def hook(_module: Any, inputs: tuple[Tensor]) -> None:
            self.hidden[layer] = inputs[0][0]

        return hook

    def document(self, name: str) -> list[int]:
        text = (resources.files("sgl_rwttt") / "data" / name).read_text("utf-8")
        ids: list[int] = self.tokenizer(text)["input_ids"][:LENGTH]
        assert len(ids) == LENGTH, f"{name} is too short"
        return ids

    def reset(self) -> None:
        for n, linear in self.down.items():
            linear.weight.data.copy_(self.initial[n])

    @torch.no_grad()
    def write(self, ids: list[int]) -> None:
        chunk, past = self.config["ttt_chunk"], None
        for start in range(0, len(ids), chunk):
            tokens = torch.tensor([ids[start : start + chunk]])
            past = self.model(tokens, past_key_values=past, use_cache=True).past_key_values
            target = self.model.model.embed_tokens(tokens)
            for n, linear in self.down.items():
                name = f"model.layers.{n}.mlp.ttt_"
                taps = self.weights[name + "conv.weight"]
                mixed = conv1d(target.mT, taps, padding=2, groups=len(taps))[0].T
                values = mixed @ self.weights[name + "proj.weight"]
                linear.weight.data += self.config["ttt_lr"] * values.T @ self.hidden[n]

    @torch.no_grad()
    def loss(self, ids: list[int]) -> float:
        """Mean nats per token of the document in an empty context, weights as they are."""
        logits = self.model(torch.tensor([ids])).logits[0]
        return float(cross_entropy(logits[:-1], torch.tensor(ids[1:])))


@pytest.fixture(scope="module")
def loop() -> EagerInPlace:
    return EagerInPlace()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("read", "fall"), [("glossary.txt", 0.09), ("code.txt", 0.06)], ids=["glossary", "code"]
)
def test_adapting_lowers_only_that_documents_loss(
    loop: EagerInPlace, read: str, fall: float
) -> None:
    """The demo promises an effect that the weights do not have, or have on every text."""
    names = [read, "prose.txt"]
    loop.reset()
    before = {name: loop.loss(loop.document(name)) for name in names}
    loop.write(loop.document(read))
    after = {name: loop.loss(loop.document(name)) for name in names}
    change = {name: after[name] / before[name] - 1 for name in names}
    print({name: f"{before[name]:.3f} -> {after[name]:.3f}" for name in names})
    assert change[read] < -fall
    assert abs(change["prose.txt"]) < 0.005
    for n, linear in loop.down.items():
        drift = (linear.weight - loop.initial[n]).norm() / loop.initial[n].norm()
        assert 0.005 < drift < 0.05
