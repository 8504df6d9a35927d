"""Decode and prefill attention over a pool of KV slots against one head at a time in float64."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.attention import Scratch, as_run
from sgl_rwttt.kernels.decode_attention import decode_attention, naive, plan
from sgl_rwttt.kernels.decode_attention.jit_impl import JitDecodeAttention
from sgl_rwttt.kernels.decode_attention.jit_plan import TaskPlan, plan_tasks
from sgl_rwttt.kernels.decode_attention.plan import DecodePlan, OwnRead, plan_decode
from sgl_rwttt.kernels.decode_attention.torch_impl import TorchDecodeAttention
from sgl_rwttt.kernels.extend_attention import naive as naive_extend
from tests.assert_close import assert_close

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 6e-3}
HEADS = {"mha": (4, 4), "gqa": (9, 3), "gqa wide": (8, 2), "mqa": (6, 1), "one": (1, 1)}
LENGTHS = {
    "one token": [1],
    "one row": [70],
    "all lengths": list(range(1, 71)),
    "equal": [33] * 4,
    "empty row": [5, 0, 9],
    "nothing": [0, 0],
    "batch 17": [(7 * i) % 41 + 1 for i in range(17)],
}
LAYOUTS = ("contiguous", "interleaved", "permuted", "scattered")


def table_of(layout: str, lengths: Sequence[int], seed: int = 0) -> Tensor:
    """[rows, longest] slots; what lies past a row's end are slots of nobody (or of others)."""
    shuffle = random.Random(seed)
    total, longest = sum(lengths), max(lengths)
    free = list(range(1, total + longest + 2))
    if layout == "scattered":
        shuffle.shuffle(free)
    order = list(range(len(lengths)))
    if layout == "permuted":
        shuffle.shuffle(order)
    rows: list[list[int]] = [[] for _ in lengths]
    if layout == "interleaved":
        for step in range(longest):
            for row in order:
                if step < lengths[row]:
                    rows[row].append(free.pop(0))
    else:
        for row in order:
            rows[row] = [free.pop(0) for _ in range(lengths[row])]
    padded = [row + shuffle.sample(free, longest - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int64)


def pools(slots: Tensor, lengths: Sequence[int], heads: int, size: int) -> tuple[Tensor, Tensor]:
    """K and V in which every slot that no row owns is NaN."""
    count = int(slots.max()) + 4 if slots.numel() else 4
    K, V = torch.full((2, count, heads, size), torch.nan)
    used = torch.cat([slots[row, :length] for row, length in enumerate(lengths)]).unique()
    K[used], V[used] = torch.randn(2, len(used), heads, size)
    return K, V


def check(
    slots: Tensor,
    lengths: Sequence[int],
    heads: tuple[int, int] = (9, 3),
    size: int = 64,
    dtype: torch.dtype = torch.float32,
) -> DecodePlan:
    torch.manual_seed(0)
    scale = 1 / math.sqrt(size)
    K, V = (pool.to(dtype) for pool in pools(slots, lengths, heads[1], size))
    q = torch.randn(len(lengths), heads[0], size).to(dtype)
    expected = naive.decode_attention(q.double(), K.double(), V.double(), slots, lengths, scale)
    row_bytes = 2 * heads[1] * size * dtype.itemsize
    with_torch = TorchDecodeAttention(Scratch())
    made = with_torch.plan(slots, lengths, row_bytes)
    for _ in range(2):  # the second call finds the scratch of the first
        out = with_torch.run(q, K, V, made, scale)
        assert out.dtype == dtype
        assert_close(out, expected, TOLERANCE[dtype])
    if dtype == torch.float32:
        for parts in (1, 2, 5):
            tasks = plan_tasks(slots, lengths, row_bytes, parts)
            assert_close(JitDecodeAttention(Scratch()).run(q, K, V, tasks, scale), expected, 1e-6)
            check_tasks(tasks, lengths)
    return made


def check_tasks(made: TaskPlan, lengths: Sequence[int]) -> None:
    """Every row's slots are read once, in equal parts up to the rows of one slot."""
    read: list[list[int]] = [[] for _ in lengths]
    done = [0]
    for first, count, partial, rows in made.tasks.tolist():
        for row in made.owners[partial : partial + rows].tolist():
            read[row].extend(made.slots.view(-1)[first : first + count].tolist())
        done.append(done[-1] + count * rows)
    for shared in made.shared:
        for row in shared.rows.tolist():
            together = (
                torch.arange(10_000)[shared.slots]
                if isinstance(shared.slots, slice)
                else shared.slots
            )
            read[row].extend(together.tolist())
    for row, length in enumerate(lengths):
        assert sorted(read[row]) == sorted(made.slots[row, :length].tolist())
        own = made.order[made.firsts[row] : made.firsts[row + 1]]
        assert (made.owners[own] == row).all()
    assert made.firsts[-1] == len(made.owners) == len(made.order.unique())
    assert made.firsts.diff().min() > 0 or not all(lengths)
    bounds = made.bounds.tolist()
    assert bounds[0] == 0 and bounds[-1] == len(made.tasks) and bounds == sorted(bounds)
    for begin, end in pairwise(bounds):
        assert done[end] - done[begin] <= done[-1] / made.parts + len(lengths)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of the plan scaled down, so that short rows make several groups and share."""
    monkeypatch.setattr(plan, "SCRATCH_BYTES", 40 * 1536)
    monkeypatch.setattr(plan, "PADDING_BYTES", 8 * 1536)
    monkeypatch.setattr(plan, "SHARED_BYTES", 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_layouts(layout: str, lengths: list[int]) -> None:
    """Guards: a row that reads another row's slots, its padding, or free memory."""
    check(table_of(layout, lengths), lengths)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_layouts_in_several_calls(layout: str, lengths: list[int], eager: None) -> None:
    """Guards: rows that change places when they are grouped by length."""
    check(table_of(layout, lengths), lengths)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [1, 7, 33, 64, 80, 128])
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_heads(heads: tuple[int, int], size: int, dtype: torch.dtype, eager: None) -> None:
    """Guards: query heads paired with the wrong KV head, or a head size that is padded away."""
    lengths = [19, 3, 70, 41]
    slots = table_of("interleaved", lengths)
    slots[1:, :2] = slots[0, :2]
    check(slots, lengths, heads, size, dtype)


@pytest.mark.parametrize("rows", range(1, 18))
def test_batch_sizes(rows: int, eager: None) -> None:
    """Guards: a batch size at which the last group is lost."""
    lengths = [(11 * i) % 70 + 1 for i in range(rows)]
    check(table_of("scattered", lengths), lengths)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("prefix", [1, 20, 39])
@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
def test_siblings_read_their_prefix_once(
    prefix: int, layout: str, dtype: torch.dtype, eager: None
) -> None:
    """Guards: a shared prefix counted twice, or for a row that does not have it."""
    lengths = [40, 44, 60, 70, 9]
    slots = table_of(layout, lengths)
    for row in (2, 3):
        slots[row, :prefix] = slots[0, :prefix]
    made = check(slots, lengths, dtype=dtype)
    (shared,) = made.shared
    assert shared.rows.tolist() == [0, 2, 3]
    assert isinstance(shared.slots, slice) == (layout == "contiguous" or prefix == 1)
    assert made.own and sum(map(rows_of, made.own)) == 5


def rows_of(read: OwnRead) -> int:
    """How many rows one call reads."""
    return 1 if isinstance(read.slots, slice) else len(read.slots) // read.width


@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
def test_a_row_alone_is_read_where_it_is(layout: str, eager: None) -> None:
    """Guards: one stream that pays for a copy of its whole KV in every layer of every step."""
    in_place = layout == "contiguous"
    (alone,) = check(table_of(layout, [40]), [40]).own
    assert isinstance(alone.slots, slice) == in_place
    slots = table_of(layout, [40, 90])
    slots[1, :20] = slots[0, :20]
    own = check(slots, [40, 90]).own
    assert [rows_of(read) for read in own] == [1, 1]
    assert [isinstance(read.slots, slice) for read in own] == [in_place] * 2


def test_siblings_with_nothing_of_their_own(eager: None) -> None:
    """Guards: rows on the very same slots, which leave nothing to read after the shared part."""
    slots = torch.arange(1, 9).repeat(3, 1)
    assert check(slots, [8, 8, 5]).shared[0].slots == slice(1, 5)
    check(slots, [1, 1, 1])


def test_a_short_prefix_is_not_worth_a_call() -> None:
    """Guards: a call and a merge per layer to save a few kilobytes of reads."""
    slots = torch.arange(1, 601).repeat(2, 1)
    slots[1, 500:] += 1000
    assert not plan_decode(slots[:, :60], [60, 60], 1536).shared
    assert plan_decode(slots, [600, 600], 1536).shared[0].slots == slice(1, 501)


def test_groups_stay_in_the_cache() -> None:
    """Guards: one long row that makes every other as wide, and gathers larger than the cache."""
    lengths = [2048, 17, 20, 2048, 300, 17]
    made = plan_decode(table_of("contiguous", lengths), lengths, 1536)
    widths = sorted((read.width, rows_of(read)) for read in made.own)
    assert widths == [(20, 3), (300, 1), (2048, 1), (2048, 1)]
    assert len(plan_decode(table_of("contiguous", [16] * 8), [16] * 8, 1536).own) == 1


def test_random_steps(eager: None) -> None:
    """Guards: a combination of siblings, lengths and layouts that no case above has."""
    draw = random.Random(1)
    for seed in range(40):
        lengths = [draw.randint(0, 60) for _ in range(draw.randint(1, 17))]
        lengths[0] = max(lengths[0], 1)
        slots = table_of(draw.choice(LAYOUTS), lengths, seed)
        for row in range(1, len(lengths)):
            if draw.random() < 0.4:
                from_row, count = draw.randrange(row), draw.randint(1, 40)
                count = min(count, lengths[from_row], lengths[row])
                slots[row, :count] = slots[from_row, :count]
        check(slots, lengths, size=8)


def test_which_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: bfloat16 read as float32, or a platform without the compiled one that cannot run."""
    assert isinstance(decode_attention(torch.float32, Scratch()), JitDecodeAttention)
    assert isinstance(decode_attention(torch.bfloat16, Scratch()), TorchDecodeAttention)
    monkeypatch.setattr("sgl_rwttt.kernels.decode_attention.compiled", lambda folder: None)
    assert isinstance(decode_attention(torch.float32, Scratch()), TorchDecodeAttention)


@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
@pytest.mark.parametrize("rows, product", [(7, False), (8, True), (17, True)])
def test_many_siblings(rows: int, product: bool, layout: str, eager: None) -> None:
    """Guards: what many rows share, and a row of its own beside them, merged wrongly."""
    lengths = [40 + 3 * (i % 5) for i in range(rows)] + [25]
    slots = table_of(layout, lengths)
    slots[1:rows, :30] = slots[0, :30]
    check(slots, lengths)
    made = plan_tasks(slots, lengths, 1536, 2)
    assert [shared.rows.tolist() for shared in made.shared] == ([list(range(rows))] * product)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a part that no thread takes, two threads with one scratch."""
    torch.manual_seed(0)
    lengths = [300, 7, 150, 41, 200]
    slots = table_of("interleaved", lengths)
    K, V = pools(slots, lengths, 3, 64)
    q = torch.randn(5, 9, 64)
    expected = naive.decode_attention(q.double(), K.double(), V.double(), slots, lengths, 0.125)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for _ in range(20):
        for parts in (1, 2, 3):
            out = JitDecodeAttention(Scratch()).run(
                q, K, V, plan_tasks(slots, lengths, 1536, parts), 0.125
            )
            assert_close(out, expected, 1e-6)


@pytest.mark.parametrize("poison", ["query", "key", "value"])
def test_poison_stays_with_its_row(poison: str) -> None:
    """Guards: NaN of one stream that reaches its neighbour, or that its own output hides."""
    torch.manual_seed(0)
    slots, lengths = table_of("interleaved", [70, 70, 70]), [70, 70, 70]
    K, V = pools(slots, lengths, 3, 64)
    q = torch.randn(3, 9, 64)
    {"query": q[1], "key": K[slots[1]], "value": V[slots[1]]}[poison].fill_(torch.nan)
    if poison != "query":
        {"key": K, "value": V}[poison][slots[1, 40]] = torch.nan
    out = JitDecodeAttention(Scratch()).run(q, K, V, plan_tasks(slots, lengths, 1536, 2), 0.125)
    assert out.isnan().flatten(1).any(1).tolist() == [False, True, False]
    assert out[1].isnan().all()


@pytest.mark.parametrize("spread", [1e-3, 30.0, 300.0])
def test_scores_of_any_size(spread: float) -> None:
    """Guards: an exponential that overflows, or is exact only near zero."""
    torch.manual_seed(0)
    slots, lengths = table_of("scattered", [300, 41]), [300, 41]
    K, V = pools(slots, lengths, 3, 64)
    q = spread * torch.randn(2, 9, 64)
    expected = naive.decode_attention(q.double(), K.double(), V.double(), slots, lengths, 0.125)
    out = JitDecodeAttention(Scratch()).run(q, K, V, plan_tasks(slots, lengths, 1536, 2), 0.125)
    assert_close(out, expected, 1e-6 * max(1.0, spread))


def test_consecutive_slots_are_a_slice() -> None:
    """Guards: a permutation with the right first and last slot taken for a run."""
    assert as_run(torch.tensor([4])) == slice(4, 5)
    assert as_run(torch.tensor([4, 5, 6])) == slice(4, 7)
    for slots in ([4, 6, 5, 7], [6, 5, 4], [4, 6], [4, 5, 5, 6]):
        assert isinstance(as_run(torch.tensor(slots)), Tensor)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("new, prefix", [(1, 0), (1, 5), (37, 0), (37, 1), (8, 61), (70, 33)])
@pytest.mark.parametrize("layout", ["contiguous", "scattered"])
def test_extend(
    layout: str, new: int, prefix: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """Guards: a new token that sees a later one, or a prefix that is read under the causal mask."""
    torch.manual_seed(0)
    slots = table_of(layout, [prefix])[0] if prefix else torch.zeros(0, dtype=torch.int64)
    K, V = (pool.to(dtype) for pool in pools(slots[None], [prefix], heads[1], 33))
    q, k, v = (torch.randn(new, count, 33).to(dtype) for count in (heads[0], heads[1], heads[1]))
    before: Any = as_run(slots) if prefix else None
    out = kernel("extend_attention")(q, k, v, K, V, before, 0.2, Scratch())
    keys, values = torch.cat([K[slots], k]).double(), torch.cat([V[slots], v]).double()
    expected = naive_extend.extend_attention(q.double(), keys, values, 0.2)
    assert_close(out, expected, TOLERANCE[dtype])
