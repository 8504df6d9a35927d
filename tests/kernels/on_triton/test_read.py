"""READ and LoRA READ against float64, one row at a time."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.apply_state import naive
from sgl_rwttt.kernels.apply_state.plan import ReadPart, plan_read
from sgl_rwttt.kernels.apply_state.tables import FEW, MANY, make_tables
from sgl_rwttt.kernels.lora_apply import naive as naive_lora
from sgl_rwttt.kernels.lora_apply.plan import plan_lora
from tests.assert_close import assert_close

# RMSE ratios: float32 is three TF32 products, whose sums tensor cores cut off; 16-bit scores are
# rounded once.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}
PAGES, BASES = 24, 4

Segments = list[list[ReadPart]]


def pools(
    segments: Segments, chunk: int, d: int, d_ff: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Pools in which everything that ``segments`` do not read is NaN, the dummies included."""
    H = torch.full((PAGES * chunk, d_ff), torch.nan)
    V = torch.full((PAGES * chunk, d), torch.nan)
    D = torch.full((BASES, d, d_ff), torch.nan)
    parts = [part for segment in segments for part in segment]
    for page in {page for part in parts for page in part.pages}:
        rows = slice(page * chunk, (page + 1) * chunk)
        H[rows], V[rows] = torch.randn(chunk, d_ff), torch.randn(chunk, d)
    for base in {part.base for part in parts} - {None}:
        D[base] = torch.randn(d, d_ff)
    return H.to(dtype), V.to(dtype), D


def check(
    segments: Segments,
    chunk: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    d: int = 63,
    d_ff: int = 100,
) -> None:
    """Rows that nobody reads are NaN in h and must stay what they were in out."""
    H, V, D = pools(segments, chunk, d, d_ff, dtype)
    parts = [part for segment in segments for part in segment]
    read = sorted({row for p in parts for row in range(p.start, p.start + p.rows)})
    count = max(read, default=0) + 3
    h, out = torch.full((count, d_ff), torch.nan), torch.randn(count, d)
    h[read] = torch.randn(len(read), d_ff)
    h = h.to(dtype)
    expected = out.double()
    naive.apply_state(h.double(), expected, parts, H.double(), V.double(), D.double(), chunk)
    plan = plan_read(segments, chunk, device)
    result = out.to(device)
    kernel("apply_state", device.type)(
        h.to(device), result, plan, H.to(device), V.to(device), D.to(device)
    )
    idle = [row for row in range(count) if row not in read]
    assert torch.equal(result.cpu()[idle], out[idle])
    assert_close(result.cpu()[read], expected[read], TOLERANCE[dtype])


CASES: dict[str, tuple[int, Segments]] = {
    "nothing": (4, [[ReadPart(0, 3, None, ())]]),
    "one row of C=1": (1, [[ReadPart(0, 1, None, (5,))]]),
    "17 owners apart": (1, [[ReadPart(i, 1, None, (1 + i, 20))] for i in range(17)]),
    "permuted owners": (
        5,
        [[ReadPart(i, 1, None, (9 - i, 12 + i))] for i in (3, 0, 2, 1)],
    ),
    "bases and pages": (
        16,
        [[ReadPart(0, 2, 3, (7,))], [ReadPart(2, 1, 1, ())], [ReadPart(4, 1, 3, (2, 3))]],
    ),
    "siblings": (5, [[ReadPart(i, 1, None, (4, 5, 6, 10 + i))] for i in range(3)]),
    "17 rows of one owner": (32, [[ReadPart(0, 17, 2, (3, 4, 1))]]),
    "prefill with folds": (
        5,
        [
            [
                ReadPart(0, 5, None, (4,)),
                ReadPart(5, 5, None, (4, 5)),
                ReadPart(10, 5, 3, ()),
                ReadPart(15, 2, 3, (7,)),
            ]
        ],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, device: torch.device) -> None:
    """Guards: a row that misses a page, reads one twice, or takes in memory that nobody wrote."""
    chunk, segments = CASES[case]
    check(segments, chunk, device)


@pytest.mark.parametrize(
    ("chunk", "d", "d_ff"), [(1, 576, 63), (5, 1, 1000), (16, 63, 1000), (128, 40, 63)]
)
def test_odd_sizes(chunk: int, d: int, d_ff: int, dtype: torch.dtype, device: torch.device) -> None:
    """Guards: a tail of a tile that is cut off or counted twice, in any dtype."""
    segments = [[ReadPart(0, 1, None, (2, 3))], [ReadPart(1, 2, 1, (5,))]]
    check(segments, chunk, device, dtype, d, d_ff)


@pytest.mark.parametrize(("rows", "d_ff"), [(1, 5000), (20, 1000)], ids=["few", "many"])
def test_large_width(rows: int, d_ff: int, dtype: torch.dtype, device: torch.device) -> None:
    """Guards: parts of a long d_ff that overlap, or whose scores are not all summed."""
    check([[ReadPart(0, rows, None, (2, 3))]], 5, device, dtype, 96, d_ff)


@pytest.mark.parametrize("seed", range(6))
def test_any_parts(seed: int, device: torch.device) -> None:
    """Guards: plans that hold only for versions that grow; here they are arbitrary."""
    rng, at = random.Random(seed), 0
    segments: Segments = []
    for _ in range(rng.randint(1, 4)):
        segments.append([])
        for _ in range(rng.randint(1, 4)):
            rows = rng.randint(0, 7)
            pages = tuple(rng.sample(range(1, 12), rng.randint(0, 6)))
            segments[-1].append(ReadPart(at, rows, rng.choice([None, 1, 2]), pages))
            at += rows
    check(segments, rng.choice([1, 4]), device, d=17, d_ff=33)


def test_tiles_by_number_of_rows(device: torch.device) -> None:
    """Guards: a case above that stops covering the tiles for many rows."""
    plan = plan_read([[ReadPart(0, 17, None, (1,))], [ReadPart(17, 1, None, (2,))]], 4, device)
    assert [launch.tiles for launch in plan.prepared(make_tables).launches] == [FEW, MANY]


LORA_SLOTS = {
    "none": [0, 0],
    "own": [3, 1, 2, 5],
    "shared and dummies": [2, 2, 0, 4, 2, 0],
    "17 rows": [1] * 17,
}


@pytest.mark.parametrize("slots", LORA_SLOTS.values(), ids=LORA_SLOTS)
@pytest.mark.parametrize("rank", [1, 33])
def test_lora(slots: list[int], rank: int, dtype: torch.dtype, device: torch.device) -> None:
    """Guards: a row under another row's adapter, dummy rows that change, wrong strides of B."""
    A = torch.full((6, rank, 63), torch.nan)
    B = torch.full((6, 40, rank), torch.nan)
    for slot in set(slots) - {0}:
        A[slot], B[slot] = torch.randn(rank, 63), torch.randn(40, rank)
    A, B, h = A.to(dtype), B.to(dtype), torch.randn(len(slots), 63).to(dtype)
    out = torch.randn(len(slots), 40)
    expected = out.double()
    naive_lora.lora_apply(h.double(), expected, slots, A.double(), B.double(), 0.5)
    result = out.to(device)
    plan = plan_lora(slots, rank, device)
    run = kernel("lora_apply", device.type)
    run(h.to(device), result, plan, A.to(device), B.to(device), 0.5)
    assert_close(result.cpu(), expected, TOLERANCE[dtype])
