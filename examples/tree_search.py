"""Tree search over branches: beam search and Monte Carlo tree search under one budget.

    python examples/tree_search.py [--url http://127.0.0.1:30000] [--budget 3]

A node of the tree is a checkpoint. To expand it, the program forks from it, lets every branch say
one more sentence and scores the branches: the value is the log-probability of the ending we want.
The state goes to the best node at the end; a node that nobody refers to is freed.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import sgl_rwttt as rw
from sgl_rwttt import gen

STORY = "A fox lived in the woods near a farm. One day it met a dog."
ENDING = " The fox and the dog became good friends."
OPENINGS = (" The fox", " The dog", " The farmer")


@dataclass
class Node:
    """A place in the tree."""

    place: rw.Checkpoint
    value: float  # mean log-probability of the ending
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    visits: int = 1
    total: float = 0.0  # of the values seen in the subtree

    def promise(self) -> float:
        """Upper confidence bound: the mean value, and more for a node rarely visited."""
        seen = self.parent.visits if self.parent else 1
        return self.total / self.visits + 0.3 * math.sqrt(math.log(seen + 1) / self.visits)


def expand(s: rw.State, node: Node) -> list[Node]:
    """Give `node` one child per opening."""
    with s.fork(len(OPENINGS), at=node.place) as branches:
        branches += [o + gen("rest", max_tokens=8, temperature=0, stop=".") for o in OPENINGS]
        branches += "."
        for branch in branches:
            value = branch.score(ENDING).mean
            node.children.append(Node(branch.checkpoint(), value, node, total=value))
    return node.children


def beam(s: rw.State, root: Node, budget: int, width: int = 2) -> Node:
    """Expand the `width` best nodes of each level until the budget is spent."""
    best, level = root, [root]
    while budget > 0:
        chosen = level[: min(width, budget)]
        budget -= len(chosen)
        level = sorted((c for n in chosen for c in expand(s, n)), key=lambda n: -n.value)
        best = max([best, *level], key=lambda n: n.value)
    return best


def mcts(s: rw.State, root: Node, budget: int) -> Node:
    """Follow the most promising child down to a leaf, expand it, tell its ancestors."""
    best = root
    for _ in range(budget):
        node = root
        while node.children:
            node = max(node.children, key=Node.promise)
        for child in expand(s, node):
            best = max(best, child, key=lambda n: n.value)
            up: Node | None = node
            while up is not None:
                up.visits, up.total, up = up.visits + 1, up.total + child.value, up.parent
    return best


@rw.function
def search(s: rw.State, method: str, budget: int) -> tuple[float, Node]:
    """Search with `budget` expansions and go on in the best place found."""
    s += STORY
    root = Node(s.checkpoint(), s.score(ENDING).mean)
    root.total = root.value
    best = {"beam": beam, "mcts": mcts}[method](s, root, budget)
    s.rollback(best.place)
    return root.value, best


def main(argv: Sequence[str] | None = None) -> dict[str, tuple[float, Node, str]]:
    """Run both searches on the embedded model in this process, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; default: the embedded model, in process")
    parser.add_argument("--budget", type=int, default=3, help="nodes that may be expanded")
    args = parser.parse_args(argv)
    if args.url:
        rw.set_default_backend(rw.Runtime(args.url))
    found = {}
    for method in ("beam", "mcts"):
        state = search.run(method=method, budget=args.budget)
        start, best = state.ret_value
        text = state.text().removeprefix(STORY)
        print(f"{method}: the ending's log-probability went from {start:.3f} to {best.value:.3f}")
        print(f"     {text}", flush=True)
        found[method] = (start, best, text)
    return found


if __name__ == "__main__":
    main()
