"""What breaks at boundaries when people serve stateful models: kinds 1 to 4.

The same on a served engine: tests/engine/test_prefix_cache.py and tests/engine/test_faults.py.
"""

from __future__ import annotations

import pytest

from sgl_rwttt.core.errors import WriteFailed
from tests.assert_close import assert_close
from tests.field.rig import LENGTHS, C, Field, mixed, prompt


def test_published_implies_written() -> None:
    """Kind 1. Guards: a mixed batch that publishes a slot without its write (sglang#39342)."""
    field = Field()
    at, before, new = field.open("at"), field.open("before"), field.open("new")
    at.feed(prompt(2 * C - 1, 1))
    before.feed(prompt(C + 1, 2))
    batch = [(at, prompt(1, 3)), (before, prompt(1, 4)), (new, prompt(2 * C + 1, 5))]
    candidates = field.plan(*batch)
    _, deltas = field.forward_rows(candidates, batch)
    fields = at.fields
    for candidate in (candidates[0], candidates[2]):  # the write of the pass is a no-op
        with pytest.raises(WriteFailed, match="commit without a write"):
            field.store.commit(candidate)
        field.store.drop(candidate)
    field.store.commit(candidates[1])
    before.took(batch[1][1], deltas[1])
    assert at.fields == fields
    for owner, tokens in (batch[0], batch[2]):
        owner.feed(tokens)
        owner.check()


@pytest.mark.parametrize("prefix", [0, 1, C - 1, C, C + 1])
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("fold", [0, 1, 2])
def test_any_length_after_any_cached_prefix(prefix: int, n: int, fold: int) -> None:
    """Kind 2. Guards: a tail of one row on a path of its own (sglang PR#29633)."""
    field = Field(fold_pages=fold)
    context = mixed(prefix + n, seed=1)
    field.close(field.open("first", context[:prefix]))
    second = field.open("second", context, limit=prefix)
    assert field.hits == prefix
    second.check()
    cold = Field(fold_pages=fold).open("cold", context)
    assert second.state.clock.state_id == cold.state.clock.state_id


@pytest.mark.parametrize("piece", [1, C - 1, C, C + 1, 7, None])
@pytest.mark.parametrize("fold", [0, 2])
def test_prefill_in_pieces_of_any_size(piece: int | None, fold: int) -> None:
    """Kind 3. Guards: state missing where a prefill chunk is smaller than the update chunk
    (sglang PR#30938, vllm#45238). Served: golden, prefix-cache and fault engines run at 3, 9, 24
    and unlimited tokens."""
    context = mixed(4 * C + 3)
    whole, parts = Field(fold_pages=fold), Field(fold_pages=fold)
    alone = whole.open("a", context)
    owner = parts.open("a")
    owner.feed(context, piece)
    owner.check()
    assert owner.state.version.id == alone.state.version.id
    assert owner.state.clock.state_id == alone.state.clock.state_id
    assert owner.tail_rows == alone.tail_rows


@pytest.mark.parametrize("kept", range(5))
def test_a_lost_state_record_is_recomputed_from_the_last_point(kept: int) -> None:
    """Kind 3. Guards: a hit of one cache but not the other (vllm#36493, vllm#40696). Served:
    test_prefix_cache.py::test_kv_without_state_is_not_a_hit."""
    field = Field(pages=8)
    context = prompt(4 * C + 1)
    field.close(field.open("first", context))
    pages = field.store.stats()["pages_live"]
    field.store.ensure_pages(7 - pages + (pages - kept))  # keep that many pages of the lineage
    field.after()
    before = field.hits
    second = field.open("second", context)
    assert field.hits - before == min(kept * C, 4 * C)
    second.check()


@pytest.mark.parametrize("cut", range(3 * C + 2))
@pytest.mark.parametrize("fold", [0, 1])
def test_any_split_gives_the_same_state(cut: int, fold: int) -> None:
    """Kind 4. Guards: chunked prefill that differs from one shot (vllm PR#23279, vllm#16942,
    state-spaces/mamba#641)."""
    context = prompt(3 * C + 1)
    whole, parts = Field(fold_pages=fold), Field(fold_pages=fold)
    alone, owner = whole.open("a", context), parts.open("a")
    owner.feed(context[:cut])
    owner.feed(context[cut:])
    owner.check()
    assert owner.state.clock.state_id == alone.state.clock.state_id
    assert owner.tail_rows == alone.tail_rows
    for slot in range(2):
        split = parts.backend.dense(owner.state.version, slot)
        once = whole.backend.dense(alone.state.version, slot)
        assert_close(split, once, 1e-6)
