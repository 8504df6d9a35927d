"""Self-check with rollback: an answer that fails its test is undone before the next attempt.

    python examples/self_check.py [--url http://127.0.0.1:30000]

The rollback takes weights, tail, KV and text back together, so a failed attempt teaches nothing:
the state id before and after it is the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sgl_rwttt as rw
from sgl_rwttt import assistant, gen, user

TASK = 'What is the capital of France? Answer in JSON with the key "capital".'
OPENINGS = ("", "Here is the JSON: ", '{"capital": "')  # how each attempt begins


@dataclass(frozen=True)
class Attempt:
    """One try, and where the state stood."""

    answer: str
    passed: bool
    before: str  # state id in front of the attempt
    wrote: str  # state id behind it
    after: str  # state id once it was judged: `before` again if it failed


def is_capital(answer: str) -> bool:
    """Whether the answer is the JSON that was asked for."""
    try:
        return bool(json.loads(answer)["capital"] == "Paris")
    except (ValueError, KeyError, TypeError):
        return False


@rw.function
def checked(s: rw.State, task: str, test: Callable[[str], bool]) -> list[Attempt]:
    """Try each opening until an answer passes. Raises ProgramFailed when none does."""
    s += user(task)
    here = s.checkpoint("asked")
    attempts: list[Attempt] = []
    for opening in OPENINGS:
        s += assistant(opening + gen("rest", max_tokens=20, temperature=0))
        answer = opening + str(s["rest"])
        passed, wrote = test(answer), s.state_id
        if not passed:
            s.rollback(here)
        attempts.append(Attempt(answer, passed, here.state_id, wrote, s.state_id))
        if passed:
            return attempts
    raise rw.ProgramFailed(f"no answer passed in {len(attempts)} attempts")


def main(argv: Sequence[str] | None = None) -> list[Attempt]:
    """Run the program on the embedded model in this process, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; default: the embedded model, in process")
    args = parser.parse_args(argv)
    if args.url:
        rw.set_default_backend(rw.Runtime(args.url))
    attempts: list[Attempt] = checked.run(task=TASK, test=is_capital).ret_value
    for i, attempt in enumerate(attempts, 1):
        verdict = "passed" if attempt.passed else "failed, rolled back"
        print(f"attempt {i}  {attempt.answer!r}: {verdict}")
        states = (attempt.before, attempt.wrote, attempt.after)
        print("           state " + " -> ".join(state[:8] for state in states))
    return attempts


if __name__ == "__main__":
    main()
