"""Which implementation of a state operation runs: one rule for all of them.

CUDA tensors go to Triton, all others to torch. With TRITON_INTERPRET=1 in the environment, set
before Triton is imported, everything goes to Triton, whose interpreter then runs the kernels on
the CPU. The exception is what exists for the CPU alone: prefill attention, in torch, and what a
decode step needs, in torch and, for float32, compiled (`compiled`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

# operation -> its folder, which holds naive.py, torch_impl.py and triton_impl.py
_FOLDERS: dict[str, str] = {
    "apply_state": "apply_state",
    "boundary_update": "boundary_update",
    "checkpoint_read": "checkpoint",
    "checkpoint_write": "checkpoint",
    "dense_update": "dense_update",
    "extend_attention": "extend_attention",
    "lora_apply": "lora_apply",
    "selective_commit": "selective_commit",
    "tail_append": "tail_append",
}
_TORCH_ONLY = frozenset({"extend_attention"})


def kernel(operation: str, device_type: str = "cpu") -> Callable[..., Any]:
    """Return the function ``operation`` for ``device_type`` ("cpu", "cuda", ...).

    Raises ValueError for an operation that does not exist. Modules are imported on first use, so
    that Triton is needed only where it runs.
    """
    language = "torch" if operation in _TORCH_ONLY else implementation(device_type)
    return _function(operation, language)


def operations() -> tuple[str, ...]:
    """The names that ``kernel`` knows."""
    return tuple(_FOLDERS)


def implementation(device_type: str) -> str:
    """The rule: "triton" or "torch"."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return "triton" if device_type == "cuda" or interpreted else "torch"


@cache
def compiled(folder: str) -> ModuleType | None:
    """``jit_impl`` of a folder, for float32 on the CPU; None where its kernels cannot run.

    Where torch is not one of its wheels for Linux, or Numba compiles nothing
    (NUMBA_DISABLE_JIT=1), ``torch_impl`` of the same folder does.
    """
    from sgl_rwttt.kernels.jit import is_available

    return import_module(f"sgl_rwttt.kernels.{folder}.jit_impl") if is_available() else None


@cache
def _function(operation: str, language: str) -> Callable[..., Any]:
    folder = _FOLDERS.get(operation)
    if folder is None:
        known = ", ".join(sorted(_FOLDERS))
        raise ValueError(f"no state kernel named {operation!r}; there are {known}")
    module = import_module(f"sgl_rwttt.kernels.{folder}.{language}_impl")
    function: Callable[..., Any] = getattr(module, operation)
    return function
