"""Which implementation of a state operation runs on which kind of device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

# operation -> device kind -> module; "any" serves every device without an entry of its own.
_MODULES: dict[str, dict[str, str]] = {
    "apply_state": {"any": "sgl_rwttt.kernels.apply_state.torch_impl"},
    "boundary_update": {"any": "sgl_rwttt.kernels.boundary_update.torch_impl"},
    "dense_update": {"any": "sgl_rwttt.kernels.dense_update.torch_impl"},
    "tail_append": {"any": "sgl_rwttt.kernels.tail_append.torch_impl"},
}


@cache
def kernel(operation: str, device_type: str = "cpu") -> Callable[..., Any]:
    """Return the function ``operation`` for ``device_type`` ("cpu", "cuda", ...).

    Raises ValueError for an operation that does not exist. Modules are imported on first use.
    """
    modules = _MODULES.get(operation)
    if modules is None:
        known = ", ".join(sorted(_MODULES))
        raise ValueError(f"no state kernel named {operation!r}; there are {known}")
    module = import_module(modules.get(device_type, modules["any"]))
    function: Callable[..., Any] = getattr(module, operation)
    return function
