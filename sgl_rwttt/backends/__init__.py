"""Update rules. ``backend_class`` imports one by name, so that importing this costs no torch."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# rule name -> module:class
BACKENDS: dict[str, str] = {
    "in_place": "sgl_rwttt.backends.in_place:InPlaceBackend",
    "lora_delta": "sgl_rwttt.backends.lora_delta:LoraDeltaBackend",
    "streaming": "sgl_rwttt.backends.streaming:StreamingBackend",
}


def backend_class(name: str) -> type[Any]:
    """Return the backend class of the rule ``name``; ValueError names the rules there are."""
    target = BACKENDS.get(name)
    if target is None:
        raise ValueError(f"no update rule named {name!r}; there are {', '.join(sorted(BACKENDS))}")
    module, _, attribute = target.partition(":")
    cls: type[Any] = getattr(import_module(module), attribute)
    return cls
