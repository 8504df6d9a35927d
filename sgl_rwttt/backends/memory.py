"""What the pools of all rules share: the form of their tensors, and what they say of themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def check_tensors(tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise ValueError naming the first tensor of ``layout`` that is missing or of another form."""
    for name, (dtype, shape) in layout.items():
        given = tensors.get(name)
        if given is None or given.dtype != dtype or tuple(given.shape) != shape:
            found = None if given is None else (given.dtype, tuple(given.shape))
            raise ValueError(f"{name} is {found}, not {(dtype, shape)}")


def sizes(backend: Any) -> dict[str, Any]:
    """Rule, dtype and slots of a backend, plain values; the beginning of its ``report``."""
    return {
        "backend": backend.name,
        "rule": backend.config.rule,
        "chunk": backend.config.chunk,
        "dtype": str(backend.dtype).removeprefix("torch."),
        "pages": backend.pages,
        "page_bytes": backend.page_bytes,
        "bases": backend.bases,
        "base_bytes": backend.base_bytes,
    }
