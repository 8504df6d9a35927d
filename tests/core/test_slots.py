"""The slot ledger."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_rwttt.core import SlotError, SlotPool, StateCapacity


@settings(deadline=None)
@given(st.integers(1, 200), st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=300))
def test_ledger_balances_over_any_sequence(total, moves):
    """Leaked or doubly listed slots (field failures 9, 10, 19)."""
    pool, live = SlotPool(total, "pages"), []
    for allocate, number in moves:
        if allocate and pool.available:
            after = number if number % 3 else None
            wanted = after is not None and after + 1 < total and not pool.is_live(after + 1)
            slot = pool.alloc(after)
            assert type(slot) is int and 0 < slot < total and slot not in live
            assert not wanted or slot == after + 1
            live.append(slot)
        elif not allocate and live:
            pool.free(live.pop(number % len(live)))
        pool.check_integrity()
        assert (pool.live, pool.available) == (len(live), total - 1 - len(live))
        assert pool.available + pool.live + pool.reserved == pool.total


@pytest.mark.parametrize("slot", [-1, 0, 5, 8, 99, True, 1.0, None, "1"], ids=repr)
def test_free_of_what_is_not_live_changes_nothing(slot):
    """A -1 sentinel, the dummy, or a slot freed twice enters the free list (field failure 10)."""
    pool = SlotPool(8, "pages")
    first, second = pool.alloc(), pool.alloc()
    pool.free(second)
    before = [pool.generation(i) for i in range(8)]
    for bad in (slot, second):
        with pytest.raises(SlotError):
            pool.free(bad)
    pool.check_integrity()
    assert (pool.live, pool.available) == (1, 6)
    assert [pool.generation(i) for i in range(8)] == before
    assert pool.is_live(first)


def test_exhaustion_names_the_limit_and_its_flag():
    """A refusal that does not say which limit was hit."""
    pool = SlotPool(3, "pages", "--ttt-pages")
    pool.alloc(), pool.alloc()
    with pytest.raises(StateCapacity, match=r"all 2 slots of the pages pool.*--ttt-pages"):
        pool.alloc()
    pool.check_integrity()


def test_generation_tells_that_a_slot_was_lost():
    """A late write lands in a slot that somebody else got (field failure 11)."""
    pool = SlotPool(4, "pages")
    slot = pool.alloc()
    held = (slot, pool.generation(slot))
    pool.free(slot)
    assert pool.generation(pool.alloc(slot - 1)) != held[1]


def test_owners_grow_in_runs():
    """Scattered pages: interleaved owners must still get consecutive slots."""
    pool, last = SlotPool(4097, "pages"), {}
    slots: dict[int, list[int]] = {owner: [] for owner in range(16)}
    for _ in range(12):
        for owner, own in slots.items():
            last[owner] = pool.alloc(last.get(owner))
            own.append(last[owner])
    breaks = sum(b != a + 1 for own in slots.values() for a, b in pairwise(own))
    assert breaks <= 1


def test_a_pool_of_the_dummy_alone_is_empty():
    """A model without bases: every alloc is refused, nothing divides by zero."""
    pool = SlotPool(1, "bases")
    pool.check_integrity()
    with pytest.raises(StateCapacity):
        pool.alloc()
    with pytest.raises(SlotError):
        SlotPool(0, "bases")
