"""A chat that adapts: what both sides say is written into the weights of this conversation.

    python examples/chat.py [--url http://127.0.0.1:30000] [a turn] [another turn] ...

At the end the conversation is taken out of the context. What the weights keep of it shows in the
loss (nats per token) of its sentences, scored with an empty context before and after.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import sgl_rwttt as rw
from sgl_rwttt import assistant, gen, user

TURNS = (
    "The tallywright counts every quorrin into a fenwick. What does the tallywright count?",
    "Nine quorrins make one dravel. The tallywright counts every dravel. What is a dravel?",
    "The tallywright counts every quorrin into a fenwick. Where does the quorrin go?",
)


@dataclass(frozen=True)
class Report:
    """What a conversation left behind."""

    answers: list[str]
    versions: list[int]  # after each answer
    before: float  # loss of the user's turns, nats per token, empty context
    after: float


@rw.function
def chat(s: rw.State, turns: Sequence[str]) -> Report:
    """Talk, clear the context, measure what the weights kept."""
    notes = " ".join(turns)
    before = -s.score(notes).mean
    answers, versions = [], []
    for i, turn in enumerate(turns):
        s += user(turn)
        s += assistant(gen(f"answer{i}", max_tokens=24, temperature=0))
        answers.append(str(s[f"answer{i}"]))
        versions.append(s.version)
        print(f"user   {turn}\nmodel  {answers[-1]}")
        print(f"       [{s.position} tokens, version {s.version}, tail {s.tail}]", flush=True)
    s.clear_context()
    return Report(answers, versions, before, -s.score(notes).mean)


def main(argv: Sequence[str] | None = None) -> Report:
    """Run the program on the embedded model in this process, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; default: the embedded model, in process")
    parser.add_argument("turns", nargs="*", default=TURNS, help="what the user says")
    args = parser.parse_args(argv)
    if args.url:
        rw.set_default_backend(rw.Runtime(args.url))
    report: Report = chat.run(turns=args.turns).ret_value
    change = report.after / report.before - 1
    print(f"\nLoss of the user's turns, nothing in the context: {report.before:.4f} before,")
    print(f"{report.after:.4f} after the conversation ({change:+.1%}).")
    return report


if __name__ == "__main__":
    main()
