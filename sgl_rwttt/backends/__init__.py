"""Update rules. ``backend_class`` imports one by name, so that importing this costs no torch."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

# rule name -> module:class
BACKENDS: dict[str, str] = {
    "in_place": "sgl_rwttt.backends.in_place:InPlaceBackend",
    "lora_delta": "sgl_rwttt.backends.lora_delta:LoraDeltaBackend",
    "streaming": "sgl_rwttt.backends.streaming:StreamingBackend",
}

GROUP = "sgl_rwttt.backends"
"""The entry points by which other distributions register theirs: name = module:class."""


def backend_class(name: str) -> type[Any]:
    """Return the backend class of the rule ``name``; the names of this package are its own.

    Raises ValueError: for an unknown name it lists those there are; for one that several
    distributions register, or whose class cannot be imported, it names the distributions.
    """
    target = BACKENDS.get(name)
    if target is not None:
        module, _, attribute = target.partition(":")
        cls: type[Any] = getattr(import_module(module), attribute)
        return cls
    entries = entry_points(group=GROUP)
    found = [entry for entry in entries if entry.name == name]
    if not found:
        others = sorted({entry.name for entry in entries} - set(BACKENDS))
        more = f", and from other distributions {', '.join(others)}" if others else ""
        raise ValueError(
            f"no update rule named {name!r}; there are {', '.join(sorted(BACKENDS))}{more}"
        )
    if len(found) > 1:
        raise ValueError(
            f"update rule {name!r} is registered {len(found)} times, by "
            f"{', '.join(sorted(map(_distribution, found)))}; keep one of them"
        )
    return _loaded(found[0])


def _loaded(entry: EntryPoint) -> type[Any]:
    place = f"update rule {entry.name!r} of distribution {_distribution(entry)}"
    try:
        cls = entry.load()
    except Exception as error:  # whatever another distribution's module does at import
        raise ValueError(f"{place}: {entry.value} cannot be imported: {error!r}") from error
    if not isinstance(cls, type):
        raise ValueError(f"{place}: {entry.value} is no class")
    return cls


def _distribution(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist is not None else "unknown"
