"""Tests of the Triton kernels: on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter.

The variable has to be set before Triton is imported, so ``test_triton.py`` runs this folder in a
process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run."""
    torch.manual_seed(0)
    return torch.device("cpu" if INTERPRETED else "cuda")


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Every dtype that a pool may have."""
    return getattr(torch, request.param)
