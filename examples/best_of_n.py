"""Best of n: several answers in branches, the most likely one stays, the others are freed.

    python examples/best_of_n.py [--url http://127.0.0.1:30000] [--n 4] [question]

The question is read once. The branches share its KV and weights until they write.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import sgl_rwttt as rw
from sgl_rwttt import assistant, gen, user


@dataclass(frozen=True)
class Candidate:
    """One branch's answer."""

    answer: str
    logprob: float  # mean per token
    state_id: str


def mean_logprob(branch: rw.State) -> float:
    """How sure the model was of its answer; what `best("answer")` compares too."""
    meta = branch.get_meta_info("answer")
    kept = meta["output_token_logprobs"][: meta["kept_tokens"]]
    return float(sum(item[0] for item in kept) / len(kept)) if kept else float("-inf")


@rw.function
def best_of_n(s: rw.State, question: str, n: int) -> list[Candidate]:
    """Answer `n` times, go on in the best branch."""
    s += user(question)
    with s.fork(n) as branches:
        branches += assistant(gen("answer", max_tokens=20, temperature=0.9))
        found = [Candidate(str(b["answer"]), mean_logprob(b), b.state_id) for b in branches]
        s.keep(branches.best(mean_logprob))
    s += user("Say that again in three words.")
    s += assistant(gen("short", max_tokens=10, temperature=0))
    return found


def main(argv: Sequence[str] | None = None) -> tuple[list[Candidate], rw.State]:
    """Run the program on the embedded model in this process, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; default: the embedded model, in process")
    parser.add_argument("--n", type=int, default=4, help="number of branches")
    parser.add_argument("question", nargs="?", default="Name a good gift for a friend.")
    args = parser.parse_args(argv)
    if args.url:
        rw.set_default_backend(rw.Runtime(args.url))
    state = best_of_n.run(question=args.question, n=args.n)
    candidates: list[Candidate] = state.ret_value
    for candidate in sorted(candidates, key=lambda c: -c.logprob):
        mark = "kept " if candidate.answer == state["answer"] else "freed"
        print(f"{mark}  {candidate.logprob:7.3f}  {candidate.answer!r}")
    print(f"then   {state['short']!r}, version {state.version}")
    return candidates, state


if __name__ == "__main__":
    main()
