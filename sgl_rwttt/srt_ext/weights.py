"""The tensors that a checkpoint must hold, by name and shape."""

from __future__ import annotations

from collections.abc import Mapping

Shapes = Mapping[str, tuple[int, ...]]


class CheckpointError(ValueError):
    """A TTT checkpoint that cannot be served; the message names the key or the tensor."""


def check_shapes(found: Shapes, expected: Shapes) -> None:
    """Raise CheckpointError naming the first expected tensor that is missing or misshapen."""
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(f"the checkpoint lacks the weight {name} {list(shape)}")
        if tuple(found[name]) != shape:
            raise CheckpointError(
                f"weight {name} has shape {list(found[name])}, expected {list(shape)}"
            )
