"""Fast weights in snapshots: what a version of In-Place TTT adds to the checkpoint's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def change(snapshot: Path) -> list[Any]:
    """W_v - W_0 of each state layer, float64 tensors [d, d_ff]; none where nothing was written."""
    from safetensors.torch import load_file

    tensors = load_file(snapshot)
    found: list[Any] = []
    for layer in range(len(next(iter(tensors.values()), ()))):
        total: Any = 0.0
        if "D" in tensors:
            total = total + tensors["D"][layer].double()
        if "H" in tensors:
            total = total + tensors["V"][layer].double().T @ tensors["H"][layer].double()
        found.append(total)
    return found


def norms(model: Path, layers: list[int]) -> list[float]:
    """|W_0| of each of these decoder layers' down projections."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", "pt") as tensors:
        names = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in layers]
        return [float(tensors.get_tensor(name).double().norm()) for name in names]
