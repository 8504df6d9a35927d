"""READ: the merged plan against one row at a time."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.apply_state import naive
from sgl_rwttt.kernels.apply_state.batches import make_batches
from sgl_rwttt.kernels.apply_state.plan import ReadPart, plan_read
from sgl_rwttt.kernels.apply_state.tables import make_tables
from tests.assert_close import assert_close

CPU = torch.device("cpu")
PAGES, BASES = 40, 6
# RMSE ratios. Of single rows, scores and the sum of a run are rounded to the pools' dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-3}


def pools(
    chunk: int, d: int, d_ff: int, segments: list[list[ReadPart]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Pools in which everything that ``segments`` do not read is NaN."""
    H = torch.full((PAGES * chunk, d_ff), torch.nan)
    V = torch.full((PAGES * chunk, d), torch.nan)
    D = torch.full((BASES, d, d_ff), torch.nan)
    for part in (part for segment in segments for part in segment):
        for page in part.pages:
            rows = slice(page * chunk, (page + 1) * chunk)
            if H[rows].isnan().any():
                H[rows], V[rows] = torch.randn(chunk, d_ff), torch.randn(chunk, d)
        if part.base is not None and D[part.base].isnan().any():
            D[part.base] = torch.randn(d, d_ff)
    return H, V, D


def check(
    segments: list[list[ReadPart]],
    chunk: int,
    d: int = 16,
    d_ff: int = 24,
    rows: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    torch.manual_seed(0)
    H, V, D = pools(chunk, d, d_ff, segments)
    H, V = H.to(dtype), V.to(dtype)
    used = [part.start + part.rows for segment in segments for part in segment]
    h, out = torch.randn(max([rows, *used]), d_ff).to(dtype), torch.randn(max([rows, *used]), d)
    expected = out.double()
    parts = [part for segment in segments for part in segment]
    naive.apply_state(h.double(), expected, parts, H.double(), V.double(), D.double(), chunk)
    kernel("apply_state")(h, out, plan_read(segments, chunk, CPU), H, V, D)
    assert_close(out, expected, TOLERANCE[dtype])


CASES = {
    "nothing": [[ReadPart(0, 3, None, ())]],
    "one": [[ReadPart(0, 1, None, (5,))]],
    "run": [[ReadPart(0, 2, None, (5, 6, 7))]],
    "descending": [[ReadPart(0, 2, None, (7, 6, 5))]],
    "base": [[ReadPart(1, 2, 3, ())]],
    "base and pages": [[ReadPart(0, 1, 3, (1, 2, 9))]],
    "siblings": [[ReadPart(i, 1, None, (4, 5, 6, 10 + 2 * i, 11 + 2 * i))] for i in range(3)],
    "siblings apart": [
        [ReadPart(0, 1, 2, (4, 5))],
        [ReadPart(1, 1, None, (8,))],
        [ReadPart(2, 2, 2, (4, 5, 6))],
    ],
    "longer sibling first": [[ReadPart(0, 1, None, (4, 5, 6))], [ReadPart(1, 1, None, (4, 5))]],
    "shared base only": [[ReadPart(i, 1, 1, (4 + i,))] for i in range(3)],
    "prefill": [[ReadPart(3 * i, 3, None, tuple(range(4, 4 + i))) for i in range(9)]],
    "prefill after a base": [[ReadPart(i, 1, 1, (20, *range(4, 4 + i))) for i in range(5)]],
    "fold inside": [
        [
            ReadPart(0, 2, None, (4,)),
            ReadPart(2, 2, None, (4, 5)),
            ReadPart(4, 2, 3, ()),
            ReadPart(6, 2, 3, (7,)),
            ReadPart(8, 2, 3, (7, 8)),
            ReadPart(10, 1, 4, ()),
        ]
    ],
    "evenly spaced": [[ReadPart(i, 1, None, (3 + 2 * i, 4 + 2 * i, 20 + i))] for i in range(5)],
    "descending owners": [[ReadPart(i, 2, 1, (30 - 3 * i, 31 - 3 * i))] for i in (0, 2, 4)],
    "uneven spaces": [[ReadPart(i, 1, None, (4 + i * i, 30 - i))] for i in range(4)],
    "prefills alike": [
        [ReadPart(6 * j + 2 * i, 2, None, tuple(range(4 + 9 * j, 4 + 9 * j + i))) for i in range(3)]
        for j in range(4)
    ],
    "readers overlap": [
        [ReadPart(0, 1, None, (4,))],
        [ReadPart(1, 1, None, (4, 8))],
        [ReadPart(2, 1, None, (8,))],
    ],
    "empty parts": [[ReadPart(0, 0, None, (3,)), ReadPart(0, 2, None, (3, 4))], []],
    "two prefills of siblings": [
        [ReadPart(2 * i, 2, None, (1, 2, *range(4, 4 + i))) for i in range(4)],
        [ReadPart(8 + 2 * i, 2, None, (1, 2, *range(14, 14 + i))) for i in range(3)],
    ],
}


@pytest.mark.parametrize("chunk", [1, 4, 5])
@pytest.mark.parametrize("case", CASES)
def test_cases(case: str, chunk: int) -> None:
    """Rows that miss a page, read one twice, or read memory that nobody wrote."""
    check(CASES[case], chunk, rows=14)


@pytest.mark.parametrize("chunk", [5, 40], ids=["short runs", "long runs"])
@pytest.mark.parametrize("case", CASES)
def test_narrow_pools(case: str, chunk: int) -> None:
    """Guards: runs that are added up in the pools' dtype; rows left out where they are widened."""
    check(CASES[case], chunk, rows=14, dtype=torch.bfloat16)


@pytest.mark.parametrize(("d", "d_ff"), [(63, 100), (1, 1), (2, 2000)])
def test_odd_sizes(d: int, d_ff: int) -> None:
    """Products that only fit even widths."""
    check(CASES["fold inside"], 5, d, d_ff)


@pytest.mark.parametrize("seed", range(30))
def test_any_parts(seed: int) -> None:
    """Plans that hold only for versions that grow: here they are arbitrary."""
    rng, at = random.Random(seed), 0
    segments: list[list[ReadPart]] = []
    for _ in range(rng.randint(1, 4)):
        segments.append([])
        for _ in range(rng.randint(1, 5)):
            rows = rng.randint(0, 3)
            pages = tuple(rng.sample(range(1, 12), rng.randint(0, 6)))
            segments[-1].append(ReadPart(at, rows, rng.choice([None, 1, 2]), pages))
            at += rows
    check(segments, rng.choice([1, 4]), rows=max(at, 1))


def test_shared_pages_are_read_once() -> None:
    """Siblings whose common pages cost one product per sibling."""
    plan = plan_read(CASES["siblings"], 4, CPU)
    assert [(group.rows, group.runs) for group in plan.groups] == [
        (((0, 3),), ((16, 28),)),
        (((0, 1),), ((40, 48),)),
        (((1, 2),), ((48, 56),)),
        (((2, 3),), ((56, 64),)),
    ]


def test_owners_of_equal_shape_are_one_product() -> None:
    """Guards: a Python loop over owners where their pages lie at equal distances."""
    plan = plan_read(CASES["evenly spaced"], 4, CPU)
    (batch,) = plan.prepared(make_batches).pages
    assert batch.rows == slice(0, 5) and batch.groups == 5
    assert [(run.firsts[0], run.rows, run.stride) for run in batch.runs] == [(12, 8, 8), (80, 4, 4)]
    (batch,) = plan_read(CASES["descending owners"], 4, CPU).prepared(make_batches).pages
    assert batch.rows.tolist() == [4, 5, 2, 3, 0, 1]
    assert [(run.firsts[0], run.rows, run.stride) for run in batch.runs] == [(72, 8, 24)]
    (batch,) = plan_read(CASES["uneven spaces"], 4, CPU).prepared(make_batches).pages
    assert [run.stride for run in batch.runs] == [None, None]


def test_launches_have_disjoint_rows() -> None:
    """Guards: programs of one launch that add to the same row at the same time."""
    for name, case in CASES.items():
        tables = plan_read(case, 4, CPU).prepared(make_tables)
        launches = [launch.rows.tolist() for launch in tables.launches]
        launches += [tables.dense.rows.tolist()] if tables.dense else []
        assert all(len(set(rows)) == len(rows) for rows in launches), name


def test_prefill_is_few_products() -> None:
    """A prefill whose every new page is a product of its own for every later part."""
    parts = [ReadPart(3 * i, 3, None, tuple(range(1, 1 + i))) for i in range(16)]
    plan = plan_read([parts], 4, CPU)
    assert sum(len(group.runs) for group in plan.groups) == 15
    assert (((24, 48),), ((4, 36),)) in [(group.rows, group.runs) for group in plan.groups]


def test_the_sum_runs_oldest_first() -> None:
    """A replay that adds a lineage's pages in another order, and so to other last bits."""
    for name, case in CASES.items():
        for part in (part for segment in case for part in segment):
            read = []
            for group in plan_read(case, 1, CPU).groups:
                if part.rows and any(a <= part.start < b for a, b in group.rows):
                    read += [i for first, end in group.runs for i in range(first, end)]
            assert read == (list(part.pages) if part.rows else []), name


def test_unknown_kernel() -> None:
    """A misspelt operation that fails only when a state is read."""
    with pytest.raises(ValueError, match="no state kernel named 'apply'"):
        kernel("apply")
