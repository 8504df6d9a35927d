"""The identity of a checkpoint, noted while it is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

import torch


class Recorder:
    """Iterates the checkpoint once, noting TTT shapes and what identifies the weights."""

    def __init__(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        noted: Callable[[str], bool] = lambda name: ".ttt_" in name,
    ) -> None:
        """``shapes`` gets the tensors whose name is ``noted``."""
        self._weights = weights
        self._noted = noted
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._digests: dict[str, bytes] = {}

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._weights:
            if self._noted(name):
                self.shapes[name] = tuple(tensor.shape)
            self._digests[name] = _sample(tensor)
            yield name, tensor

    def fingerprint(self, config: object) -> str:
        """Identity of model and rule: names, shapes, dtypes and 64 values of every tensor."""
        digest = hashlib.blake2b(repr(config).encode(), digest_size=16)
        for name in sorted(self._digests):
            digest.update(name.encode() + self._digests[name])
        return digest.hexdigest()


def _sample(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    picked = flat[:: max(1, flat.numel() // 64)].float().cpu().contiguous()
    return f"{tuple(tensor.shape)} {tensor.dtype}".encode() + picked.numpy().tobytes()
