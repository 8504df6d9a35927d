"""What breaks at the extremes of bookkeeping: kind 19. `make soak` runs the same for longer."""

from __future__ import annotations

import pytest

from tests.field.walk import SHAPES, Walk


@pytest.mark.parametrize("seed", range(len(SHAPES)))
def test_random_walk(seed: int) -> None:
    """Kind 19. Guards: hit and evict bookkeeping (mini-sglang PR#142, nano-vllm#144, nano-vllm
    PR#211): 2,000 operations over four pool sizes, the ledger and NaN markers after each, the
    oracle on every answer and on every state at the end, prompts that are known as a whole among
    them."""
    walk = Walk(seed)
    walk.run(2000 // len(SHAPES))
    walk.end()
    stats = walk.field.store.stats()
    assert walk.done["whole prompts hit"] > 2, walk.done
    assert stats["commits"] > 100 and stats["forks"] > 2, stats
    assert stats["evictions"] > 2 and stats["drops"] > 2 and stats["adoptions"] > 0, stats


def test_equal_seeds_give_equal_walks() -> None:
    """Guards: a failure of the soak that its seed does not reproduce."""
    first, second = Walk(5), Walk(5)
    for walk in (first, second):
        walk.run(60)
    assert first.done == second.done
    assert first.field.store.stats() == second.field.store.stats()
    assert [o.context for o in first.field.owners] == [o.context for o in second.field.owners]
