"""Adapt on documents, then ask with an empty context: only the weights can know them.

python examples/closed_book.py [--url http://127.0.0.1:30000] [file.txt ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import sgl_rwttt as rw
from sgl_rwttt import assistant, gen, user

QUESTION = "What is a quorrin?"


@dataclass(frozen=True)
class Reading:
    """Losses (nats per token, empty context) and the answer, at one point."""

    losses: list[float]
    answer: str
    position: int  # tokens in the context when the question was asked
    version: int


def look(s: rw.State, documents: Sequence[str], question: str) -> Reading:
    """Score and ask on a scratch branch that only reads: nothing here is learnt."""
    losses = [-s.score(document).mean for document in documents]
    with s.peek() as p:
        position = p.position
        p += user(question) + assistant(gen("answer", max_tokens=20, temperature=0))
        return Reading(losses, str(p["answer"]), position, s.version)


@rw.function
def closed_book(s: rw.State, documents: Sequence[str], question: str) -> tuple[Reading, Reading]:
    """Look, adapt on every document, look again."""
    before = look(s, documents, question)
    for document in documents:
        s.adapt(document)  # write it, then drop the context
    return before, look(s, documents, question)


def own_documents() -> list[str]:
    """Two texts that come with the package."""
    folder = files("sgl_rwttt") / "data"
    return [(folder / f"{n}.txt").read_text("utf-8")[:700] for n in ("glossary", "code")]


def main(argv: Sequence[str] | None = None) -> tuple[Reading, Reading]:
    """Run the program on the embedded model in this process, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; default: the embedded model, in process")
    parser.add_argument("files", nargs="*", type=Path, help="documents; default: two of our own")
    parser.add_argument("--question", default=QUESTION)
    args = parser.parse_args(argv)
    if args.url:
        rw.set_default_backend(rw.Runtime(args.url))
    documents = [path.read_text("utf-8") for path in args.files] or own_documents()
    before, after = closed_book.run(documents=documents, question=args.question).ret_value
    for i, (old, new) in enumerate(zip(before.losses, after.losses, strict=True)):
        print(f"document {i}: loss {old:.4f} -> {new:.4f} ({new / old - 1:+.1%})")
    print(f"{args.question}  (context: {after.position} tokens, version {after.version})")
    print(f"  before {before.answer!r}\n  after  {after.answer!r}")
    return before, after


if __name__ == "__main__":
    main()
