"""Texts that a model was not fitted to and that are on any machine: the benchmarks of adapting.

glossary  made up: entries about invented words, which later entries use
code      modules of Python's standard library
prose     topics of Python's reference manual, as `pydoc` has them
pages     the descriptions of the installed Python distributions (Markdown and reStructuredText)
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from importlib.metadata import distributions
from itertools import count
from pathlib import Path
from typing import Any

KINDS = ("glossary", "code", "prose", "pages")
HEAD = 1000  # characters that are left out where a text begins with licences, badges, imports
ENTRIES = 24  # of one glossary

_SYLLABLES = "bri vel quo dra fen oss tal mar wick plet rin gar nub lor zet hask mip und tro yel"
_PLACES = ("harbour", "mill", "market", "archive", "quarry", "orchard", "foundry", "lighthouse")
_FORMS = (
    "{A} is a small copper weight that a {b} hangs on the rope of every {c}. When the bell rings, "
    "the {a} knocks against the wall and the {b} knows that the work has to stop.",
    "{A} is the flat glass coin of the {place}. Nine of them make one {b}, and nobody may take "
    "one out of a {c} before the evening.",
    "{A} is a grey reed that grows behind the {place}. It is cut in spring, dried for nine days "
    "and woven into the lid of a {b}. A wet {a} is worth no more than one {c}.",
    "{A} is a round box with two locks. The {b} keeps one key and the {c} keeps the other, so "
    "that neither can open the {a} alone.",
    "{A} is whoever counts what comes into the {place}. A {a} writes each {b} into a ledger and "
    "reads the sum aloud when a {c} asks for it.",
    "{A} is the fine for losing a {b}. It is paid in the {place} on the first day of the month, "
    "and the {c} who takes it gives a receipt.",
    "{A} is a lamp with a blue shade. It burns as long as a {b} is inside the {place}; when it is "
    "dark, every {c} waits outside.",
    "{A} is an old song about a {b} that fell in love with a {c}. In the {place} it is sung "
    "twice a year, and never by the same {a}.",
    "{A} is the narrow door on the north side. Only a {b} may open it, and it stays open until "
    "the last {c} has been carried through.",
    "{A} is bread baked with salt water. Whoever eats {a} before noon owes the {b} a favour, "
    "which is why a {c} always eats late.",
    "{A} is a knot that cannot be untied by one person. It closes the sack in which the {b} "
    "travels, and learning it takes a {c} about a year.",
    "{A} is the wind that comes after snow. It fills the yard of the {place} with leaves, and "
    "then no {b} can be told from a {c}.",
    "{A} is a list of debts, kept in red ink. When a {b} dies, the list is read once more and "
    "given to the youngest {c}.",
    "{A} is a measure of length, as long as a {b} is wide. Cloth for the {place} is sold by the "
    "{a}, cloth for anybody else by the {c}.",
    "{A} is a small brown bird. It nests under the roof of the {place}, steals the shine off any "
    "{b}, and is said to bring luck to a {c}.",
    "{A} is what remains in the pan when a {b} has been boiled. It is black, smells of iron and "
    "is used to paint the number on each {c}.",
)


def texts(kind: str) -> Iterator[str]:
    """Documents of one kind, in a fixed order; ValueError for a kind that is not in `KINDS`."""
    if kind == "glossary":
        yield from map(glossary, count())
    elif kind == "code":
        for file in sorted(Path(os.__file__).parent.glob("*.py")):
            yield file.read_text(encoding="utf-8", errors="replace")[HEAD:]
    elif kind == "prose":
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))
    elif kind == "pages":
        found = {each.metadata["Name"].lower(): each.metadata for each in distributions()}
        for _, metadata in sorted(found.items()):
            yield str(metadata.get("Description") or metadata.get_payload() or "")[HEAD:]
    else:
        raise ValueError(f"no documents of kind {kind!r}; there are {', '.join(KINDS)}")


def glossary(number: int) -> str:
    """The glossary of that number: always the same text, and another one for another number."""
    rng = random.Random(number)
    syllables, place = _SYLLABLES.split(), rng.choice(_PLACES)
    words: list[str] = []
    while len(words) < ENTRIES:
        word = "".join(rng.sample(syllables, 2 + len(words) % 2))
        words += [word] if word not in words else []
    entries = [f"A glossary of the {place} of {rng.choice(words).capitalize()}."]
    forms: list[str] = []
    for word in words:
        forms = forms or rng.sample(_FORMS, len(_FORMS))
        b, c = rng.sample([other for other in words if other != word], 2)
        names = {"A": f"A {word}", "a": word, "b": b, "c": c, "place": place}
        entries.append(f"{word.capitalize()}. {forms.pop().format(**names)}")
    return "\n\n".join(entries)


def documents(kind: str, tokenizer: Any, number: int, length: int) -> list[list[int]]:
    """Token ids of the first `number` documents that have `length` tokens.

    Raises ValueError when there are not so many.
    """
    found: list[list[int]] = []
    for tried, text in enumerate(texts(kind)):
        ids = tokenizer.encode(text[: 12 * length], add_special_tokens=False).ids
        if len(ids) >= length:
            found.append(ids[:length])
        if len(found) == number:
            return found
        if kind == "glossary" and tried >= 2 * number:
            break  # there is no end of them
    raise ValueError(f"{len(found)} documents of kind {kind} have {length} tokens, not {number}")


def stream(kind: str, tokenizer: Any, length: int) -> list[int]:
    """`length` token ids of one document after another; ValueError when there are not so many."""
    ids: list[int] = []
    for text in texts(kind):
        ids += tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= length:
            return ids[:length]
    raise ValueError(f"all documents of kind {kind} have {len(ids)} tokens, not {length}")
