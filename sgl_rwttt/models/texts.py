"""The texts that come with the package."""

from __future__ import annotations

from pathlib import Path

FREQUENCY = "frequency"  # what the recipe counts tokens in and runs a model on
DOCUMENTS = ("glossary", "code", "prose")  # what a conversion is judged by

_DATA = Path(__file__).resolve().parent.parent / "data"


def text(name: str) -> str:
    """One of the texts, by name."""
    return (_DATA / f"{name}.txt").read_text(encoding="utf-8")
