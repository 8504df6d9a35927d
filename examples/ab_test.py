"""A/B of two documents: sibling branches adapt on one each, both are measured on both.

    python examples/ab_test.py [--url http://127.0.0.1:30000]

The branches share one owner and one starting state. Neither sees what the other has read.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import sgl_rwttt as rw


@dataclass(frozen=True)
class Row:
    """Losses of both documents (nats per token, empty context) in one branch."""

    name: str
    version: int
    a: float
    b: float


def measure(name: str, s: rw.State, a: str, b: str) -> Row:
    """Score both documents here; reading moves nothing."""
    return Row(name, s.version, -s.score(a).mean, -s.score(b).mean)


@rw.function
def ab_test(s: rw.State, a: str, b: str, held_out: str) -> list[Row]:
    """Adapt two branches, measure, go on in the one that knows `held_out` better."""
    rows = [measure("start", s, a, b)]
    with s.fork(2) as branches:
        for branch, document in zip(branches, (a, b), strict=True):
            branch.adapt(document)  # queued: both branches adapt at the same time
        rows += [measure(f"read {n}", x, a, b) for n, x in zip("AB", branches, strict=True)]
        s.keep(branches.best(lambda branch: branch.score(held_out).mean))
    rows.append(measure("kept", s, a, b))
    return rows


def text(name: str) -> str:
    """The beginning of a text that comes with the package."""
    return (files("sgl_rwttt") / "data" / f"{name}.txt").read_text(encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Run the program on the embedded model in this process, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; default: the embedded model, in process")
    args = parser.parse_args(argv)
    if args.url:
        rw.set_default_backend(rw.Runtime(args.url))
    glossary, code = text("glossary"), text("code")
    state = ab_test.run(a=glossary[:700], b=code[:700], held_out=glossary[700:1000])
    rows: list[Row] = state.ret_value
    print(f"{'branch':<8} {'version':>7}  {'loss of A':>9}  {'loss of B':>9}")
    for row in rows:
        print(f"{row.name:<8} {row.version:>7}  {row.a:9.4f}  {row.b:9.4f}")
    return rows


if __name__ == "__main__":
    main()
