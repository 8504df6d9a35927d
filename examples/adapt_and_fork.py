"""A model that learns a document while it serves, forks, and goes back.

Run it with `make demo`, or against a server:

    python examples/adapt_and_fork.py --url http://127.0.0.1:30000

Every number is computed while you watch: the mean loss (nats per token) and the perplexity of a
document and of a text that has nothing to do with it, each scored in read mode with an empty
context, so that only the weights can know the document.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from importlib.resources import files

import sgl_rwttt as rw


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    step: str
    version: int
    state_id: str
    document: rw.Score
    unrelated: rw.Score


def measure(s: rw.State, step: str, document: str, unrelated: str) -> Row:
    """Score both texts at this state; reading moves nothing."""
    row = Row(step, s.version, s.state_id, s.score(document), s.score(unrelated))
    print(
        f"  {row.step:<34} v{row.version:<3} {row.state_id[:12]}  "
        f"{-row.document.mean:6.4f} {row.document.perplexity:7.2f}    "
        f"{-row.unrelated.mean:6.4f} {row.unrelated.perplexity:7.2f}",
        flush=True,
    )
    return row


@rw.function
def adapt_and_fork(s: rw.State, document: str, other: str, unrelated: str) -> list[Row]:
    """Adapt on a document, fork to adapt on another one, roll back."""
    rows = [measure(s, "before", document, unrelated)]
    start = s.checkpoint("start")

    s.adapt(document)  # write the document, then drop the context; the weights keep it
    rows.append(measure(s, "after adapting on the document", document, unrelated))

    with s.fork(1, at=start) as branches:  # a sibling that never saw the document
        branches[0].adapt(other)
        rows.append(measure(branches[0], "in a fork that read other text", document, unrelated))

    rows.append(measure(s, "back in the parent", document, unrelated))

    s.rollback(start)
    rows.append(measure(s, "after the rollback", document, unrelated))
    return rows


def text(name: str) -> str:
    """One of the texts that come with the package."""
    return (files("sgl_rwttt") / "data" / f"{name}.txt").read_text(encoding="utf-8")


def report(rows: list[Row]) -> None:
    """What the numbers say, computed from them."""
    before, after, fork, parent, back = rows
    change = after.document.mean / before.document.mean - 1
    moved = after.unrelated.mean / before.unrelated.mean - 1
    forked = fork.document.mean / before.document.mean - 1
    print(f"\nThe document's loss moved by {change:+.1%}, the unrelated text's by {moved:+.1%}.")
    print(f"In the fork, which read something else, the document's loss moved by {forked:+.1%}.")
    print(f"The fork left the parent alone: {parent.document.mean == after.document.mean}.")
    same = back.document.mean == before.document.mean and back.state_id == before.state_id
    print(f"The rollback restored the first number and state exactly: {same}.")


def main() -> None:
    """Run the program on the embedded model in this process, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; default: the embedded model, in process")
    url = parser.parse_args().url
    if url is None:
        print("Starting SGLang with the embedded model (about half a minute) ...", flush=True)
    backend = rw.Engine() if url is None else rw.Runtime(url)
    print(f"\n  {'':<34} {'':4} {'state':<12}  {'document':<14}    unrelated text")
    print(f"  {'step':<34} {'':4} {'':12}  {'loss':<6} {'ppl':>7}    {'loss':<6} {'ppl':>7}")
    try:
        state = adapt_and_fork.run(
            document=text("glossary"), other=text("code"), unrelated=text("prose"), backend=backend
        )
        report(state.ret_value)
    finally:
        backend.shutdown()


if __name__ == "__main__":
    main()
