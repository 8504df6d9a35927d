"""Save today, go on tomorrow: snapshots keep what a program has learnt, and where it stopped.

    python examples/resume.py today         # adapts, talks, saves, ends
    python examples/resume.py tomorrow      # another process starts on the files

In process the files lie in --folder. A server (--url) keeps them in its own --snapshot-dir.
Without a word it does both, one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import sgl_rwttt as rw
from sgl_rwttt import assistant, gen, user


@dataclass(frozen=True)
class Place:
    """Where a state stands, and what it says or measures there."""

    version: int
    position: int  # tokens of the context
    state_id: str
    result: str


def place(when: str, s: rw.State, result: str) -> Place:
    """Say where `s` is."""
    print(f"{when:<21} version {s.version:<3} {s.position:>3} tokens  {s.state_id[:8]}  {result}")
    return Place(s.version, s.position, s.state_id, result)


@rw.function
def exam(s: rw.State, document: str, when: str) -> Place:
    """What the weights know of the document: its loss (nats per token) in an empty context."""
    return place(when, s, f"loss {-s.score(document).mean:.4f}")


@rw.function
def go_on(s: rw.State, when: str) -> Place:
    """The next turn of the lesson."""
    s += user("Say that in five words.") + assistant(gen("next", max_tokens=12, temperature=0))
    return place(when, s, repr(s["next"]))


@rw.function
def lesson(s: rw.State, document: str) -> list[Place]:
    """Learn, save the weights, talk, save everything, and go on as if nothing had been saved."""
    s.adapt(document)
    learnt = exam.func(s, document, "today, learnt")
    s.snapshot("tutor", replace=True)  # the weights
    s += user("What is a quorrin?") + assistant(gen("first", max_tokens=16, temperature=0))
    s.snapshot("lesson", kv=True, replace=True)  # weights, context, KV, text and role
    return [learnt, go_on.func(s, "today, next turn")]


def main(argv: Sequence[str] | None = None, backend: rw.StateBackend | None = None) -> list[Place]:
    """Run on the embedded model in this process, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; default: the embedded model, in process")
    parser.add_argument("--folder", type=Path, default=Path("snapshots"))
    parser.add_argument("day", nargs="?", choices=("today", "tomorrow", "both"), default="both")
    args = parser.parse_args(argv)
    if args.url:
        backend = rw.Runtime(args.url)
    elif backend is None:
        args.folder.mkdir(exist_ok=True)
        backend = rw.Engine(ttt_snapshot_dir=str(args.folder))
    document = (files("sgl_rwttt") / "data" / "glossary.txt").read_text("utf-8")[:900]
    places: list[Place] = []
    if args.day != "tomorrow":
        new = exam.run(document=document, when="today, at first", backend=backend)
        places = [new.ret_value, *lesson.run(document=document, backend=backend).ret_value]
    if args.day != "today":
        tutor = exam.run(document, "tomorrow, the weights", backend=backend, state="tutor")
        again = go_on.run("tomorrow, next turn", backend=backend, state="lesson")
        places += [tutor.ret_value, again.ret_value]
    return places


if __name__ == "__main__":
    main()
