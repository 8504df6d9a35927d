"""The state kernels with random inputs: what runs, what it is compared with, what limits it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sgl_rwttt.kernels import kernel
from sgl_rwttt.kernels.apply_state.plan import ReadPart, ReadPlan, plan_read
from sgl_rwttt.kernels.boundary_update.torch_impl import boundary_update as eager_boundary
from sgl_rwttt.kernels.checkpoint.torch_impl import checkpoint_read as eager_checkpoint_read
from sgl_rwttt.kernels.checkpoint.torch_impl import checkpoint_write as eager_checkpoint_write
from sgl_rwttt.kernels.dense_update.torch_impl import dense_update as eager_fold
from sgl_rwttt.kernels.lora_apply.plan import plan_lora
from sgl_rwttt.kernels.lora_apply.torch_impl import lora_apply as eager_lora
from sgl_rwttt.kernels.selective_commit.torch_impl import selective_commit as eager_commit
from sgl_rwttt.kernels.tail_append.plan import plan_append
from sgl_rwttt.kernels.tail_append.torch_impl import tail_append as eager_append

# RMSE ratios against float64. Float32 factors are multiplied as three TF32 products, whose sums the
# tensor cores cut off; Triton's interpreter cuts bfloat16 off instead of rounding it.
PRODUCT = {torch.float32: 3e-5, torch.bfloat16: 8e-3}
FOLD = 3e-5  # factors as they are, sums float32
EXACT = 0.0
LR = 0.1


@dataclass(frozen=True)
class Shape:
    """Qwen3-4B, eight owners, half the pages at which a base is due."""

    d: int = 2560
    d_ff: int = 9728
    layers: int = 6
    chunk: int = 128
    owners: int = 8
    pages: int = 8  # per owner
    rank: int = 16

    @property
    def rows(self) -> int:
        """Page rows of one owner."""
        return self.pages * self.chunk


TINY = Shape(d=48, d_ff=80, layers=2, chunk=4, owners=3, pages=2, rank=4)


@dataclass(frozen=True)
class Case:
    """One operation. Calls take the turn's number and use the tensors of another layer each."""

    name: str
    run: Callable[[int], Any]
    eager: Callable[[int], Any]
    error: Callable[[], float]  # RMSE ratio against float64
    tolerance: float
    moved: int  # bytes that have to be read and written
    operations: int = 0  # multiplications and additions of matrix products
    private: Callable[[int], Any] | None = None  # torch.bmm over private dense weights


class Data:
    """Pools of all layers and private weights. Owner i has the pages 1 + i * pages onwards."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        s = shape
        rows = (s.owners * s.pages + 1) * s.chunk
        self.H = self.normal(s.layers, rows, s.d_ff)
        self.V = self.normal(s.layers, rows, s.d)
        self.D = self.normal(s.layers, s.owners + 1, s.d, s.d_ff, dtype=torch.float32)
        self.W = self.normal(s.layers, s.owners, s.d, s.d_ff)
        self.h = self.normal(s.owners, s.d_ff)
        self.out = torch.zeros(s.owners, s.d, device=device)

    def normal(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Random numbers with the variance of a layer's weights; the seed is set by the caller."""
        values = torch.empty(size, dtype=dtype or self.dtype, device=self.device)
        for part in values.flatten(0, -2).split(65536):
            part.normal_(std=size[-1] ** -0.5)
        return values

    def kernel(self, name: str) -> Callable[..., Any]:
        """The implementation that is measured."""
        return kernel(name, self.device.type)

    def pages_of(self, owner: int) -> tuple[int, ...]:
        """Pages of one owner, oldest first."""
        first = 1 + owner * self.shape.pages
        return tuple(range(first, first + self.shape.pages))

    def by_owner(self, pool: Tensor, layer: int) -> Tensor:
        """One layer's pool as [owners, rows, width]."""
        return pool[layer, self.shape.chunk :].view(self.shape.owners, self.shape.rows, -1)


def cases(data: Data) -> Iterator[Case]:
    """Every operation at the shape and dtype of ``data``."""
    yield _read_apart(data)
    yield _read_siblings(data)
    yield _read_bases(data)
    yield _read_prefill(data)
    yield _lora(data)
    yield _append(data)
    yield _boundary(data)
    yield _fold(data)
    yield _commit(data)
    yield _checkpoint_write(data)
    yield _checkpoint_read(data)


def ratio(actual: Tensor, expected: Tensor) -> float:
    """RMSE over the root mean square of ``expected``; infinite for a number that is not finite."""
    error = (actual.double() - expected).square().mean().sqrt()
    result = float(error / expected.square().mean().sqrt())
    return result if result == result else float("inf")


def _apply(data: Data, h: Tensor, out: Tensor, plan: ReadPlan, turn: int) -> None:
    layer = turn % data.shape.layers
    data.kernel("apply_state")(h, out, plan, data.H[layer], data.V[layer], data.D[layer])


def _private(data: Data, turn: int) -> Tensor:
    return torch.bmm(data.h[:, None], data.W[turn % data.shape.layers].transpose(1, 2))


def _decode_error(data: Data, plan: ReadPlan, expected: Tensor) -> float:
    data.out.zero_()
    _apply(data, data.h, data.out, plan, 0)
    return ratio(data.out, expected)


def _read_apart(data: Data) -> Case:
    s = data.shape
    parts = [[ReadPart(i, 1, None, data.pages_of(i))] for i in range(s.owners)]
    plan = plan_read(parts, s.chunk, data.device)

    def eager(turn: int) -> None:
        H, V = (data.by_owner(pool, turn % s.layers) for pool in (data.H, data.V))
        data.out.add_(torch.bmm(torch.bmm(data.h[:, None], H.transpose(1, 2)), V)[:, 0])

    def error() -> float:
        H, V = (data.by_owner(pool, 0).double() for pool in (data.H, data.V))
        return _decode_error(data, plan, torch.einsum("of,orf,ord->od", data.h.double(), H, V))

    rows = s.owners * s.rows
    return Case(
        f"apply_state, {s.owners} owners x {s.rows} page rows",
        partial(_apply, data, data.h, data.out, plan),
        eager,
        error,
        PRODUCT[data.dtype],
        moved=rows * (s.d_ff + s.d) * data.dtype.itemsize,
        private=partial(_private, data),
    )


def _read_siblings(data: Data) -> Case:
    s = data.shape
    parts = [[ReadPart(i, 1, None, data.pages_of(0))] for i in range(s.owners)]
    plan = plan_read(parts, s.chunk, data.device)
    own = slice(s.chunk, s.chunk + s.rows)

    def eager(turn: int) -> None:
        H, V = data.H[turn % s.layers, own], data.V[turn % s.layers, own]
        data.out.add_((data.h @ H.T) @ V)

    def error() -> float:
        expected = data.h.double() @ data.H[0, own].double().T @ data.V[0, own].double()
        return _decode_error(data, plan, expected)

    return Case(
        f"apply_state, {s.owners} siblings, {s.rows} shared page rows",
        partial(_apply, data, data.h, data.out, plan),
        eager,
        error,
        PRODUCT[data.dtype],
        moved=s.rows * (s.d_ff + s.d) * data.dtype.itemsize,
        private=partial(_private, data),
    )


def _read_bases(data: Data) -> Case:
    s = data.shape
    parts = [[ReadPart(i, 1, 1 + i, ())] for i in range(s.owners)]
    plan = plan_read(parts, s.chunk, data.device)

    def eager(turn: int) -> None:
        D = data.D[turn % s.layers, 1:]
        data.out.add_(torch.bmm(data.h.float()[:, None], D.transpose(1, 2))[:, 0])

    def error() -> float:
        expected = torch.einsum("of,odf->od", data.h.double(), data.D[0, 1:].double())
        return _decode_error(data, plan, expected)

    return Case(
        f"apply_state, {s.owners} owners, each a dense base (float32)",
        partial(_apply, data, data.h, data.out, plan),
        eager,
        error,
        PRODUCT[torch.float32],
        moved=s.owners * s.d * s.d_ff * 4,
        private=partial(_private, data),
    )


def _read_prefill(data: Data) -> Case:
    s = data.shape
    first, rows, pages = s.chunk, s.rows, data.pages_of(0)
    parts = [ReadPart(i * s.chunk, s.chunk, None, pages[:i]) for i in range(s.pages)]
    plan = plan_read([parts], s.chunk, data.device)
    h, out = data.normal(rows, s.d_ff), torch.zeros(rows, s.d, device=data.device)

    def blocks(H: Tensor, V: Tensor, h: Tensor, out: Tensor) -> None:
        for part in parts[1:]:
            at = slice(part.start, part.start + part.rows)
            read = slice(first, first + len(part.pages) * s.chunk)
            out[at] += (h[at] @ H[read].T) @ V[read]

    def eager(turn: int) -> None:
        blocks(data.H[turn % s.layers], data.V[turn % s.layers], h, out)

    def error() -> float:
        out.zero_()
        _apply(data, h, out, plan, 0)
        expected = torch.zeros_like(out, dtype=torch.float64)
        blocks(data.H[0].double(), data.V[0].double(), h.double(), expected)
        return ratio(out, expected)

    pairs = s.chunk * s.chunk * s.pages * (s.pages - 1) // 2
    return Case(
        f"apply_state, prefill of {s.pages} chunks",
        partial(_apply, data, h, out, plan),
        eager,
        error,
        PRODUCT[data.dtype],
        moved=2 * rows * (s.d_ff + s.d) * data.dtype.itemsize,
        operations=2 * pairs * (s.d_ff + s.d),
    )


def _lora(data: Data) -> Case:
    s = data.shape
    A = data.normal(s.layers, s.owners + 1, s.rank, s.d)
    B = data.normal(s.layers, s.owners + 1, s.d_ff, s.rank)
    x, y = data.normal(s.owners, s.d), torch.zeros(s.owners, s.d_ff, device=data.device)
    plan = plan_lora(range(1, s.owners + 1), s.rank, data.device)

    def call(apply: Callable[..., None], turn: int) -> None:
        apply(x, y, plan, A[turn % s.layers], B[turn % s.layers], 0.5)

    def error() -> float:
        y.zero_()
        call(data.kernel("lora_apply"), 0)
        factors = (x.double(), A[0, 1:].double(), B[0, 1:].double())
        return ratio(y, 0.5 * torch.einsum("oi,ori,ojr->oj", *factors))

    return Case(
        f"lora_apply, {s.owners} adapters of rank {s.rank}",
        partial(call, data.kernel("lora_apply")),
        partial(call, eager_lora),
        error,
        PRODUCT[data.dtype],
        moved=s.owners * s.rank * (s.d + s.d_ff) * data.dtype.itemsize,
    )


def _append(data: Data) -> Case:
    s = data.shape
    h = data.normal(s.rows, s.d_ff)
    t = data.normal(s.rows, s.d)
    plan = plan_append([(0, s.chunk, s.rows)], data.device)
    own = slice(s.chunk, s.chunk + s.rows)

    def call(append: Callable[..., None], turn: int) -> None:
        append(h, t, data.H[turn % s.layers], data.V[turn % s.layers], plan)

    def error() -> float:
        call(data.kernel("tail_append"), 0)
        wrong = (data.H[0, own] != h).any() | (data.V[0, own] != t).any()
        return float(wrong)

    return Case(
        f"tail_append, {s.rows} rows",
        partial(call, data.kernel("tail_append")),
        partial(call, eager_append),
        error,
        EXACT,
        moved=2 * s.rows * (s.d_ff + s.d) * data.dtype.itemsize,
    )


def _boundary(data: Data) -> Case:
    s = data.shape
    T = data.normal(s.layers, s.owners, s.chunk, s.d)
    conv = data.normal(s.layers, s.d, 5)
    P = data.normal(s.layers, s.d, s.d)

    def call(update: Callable[..., Tensor], turn: int) -> Tensor:
        layer = turn % s.layers
        return update(T[layer], conv[layer], P[layer], LR)

    def error() -> float:
        taps = conv[0].double().view(s.d, 1, 5)
        columns = T[0].double().transpose(1, 2)
        mixed = torch.nn.functional.conv1d(columns, taps, padding=2, groups=s.d)
        expected = LR * mixed.transpose(1, 2) @ P[0].double()
        return ratio(call(data.kernel("boundary_update"), 0), expected)

    rows = s.owners * s.chunk
    return Case(
        f"boundary_update, {s.owners} chunks",
        partial(call, data.kernel("boundary_update")),
        partial(call, eager_boundary),
        error,
        PRODUCT[data.dtype],
        moved=(2 * rows * s.d + s.d * s.d) * data.dtype.itemsize,
        operations=2 * rows * s.d * s.d,
    )


def _fold(data: Data) -> Case:
    s = data.shape
    runs = ((s.chunk, s.chunk + 2 * s.rows),)  # of two owners: as many rows as a base is due at
    own = slice(*runs[0])

    def call(fold: Callable[..., None], turn: int) -> None:
        layer = turn % s.layers
        fold(data.D[layer], 1, 2, runs, data.H[layer], data.V[layer])

    def error() -> float:
        call(data.kernel("dense_update"), 0)
        expected = data.D[0, 1].double() + data.V[0, own].double().T @ data.H[0, own].double()
        return ratio(data.D[0, 2], expected)

    return Case(
        f"dense_update, {2 * s.rows} page rows",
        partial(call, data.kernel("dense_update")),
        partial(call, eager_fold),
        error,
        FOLD,
        moved=2 * s.d * s.d_ff * 4 + 2 * s.rows * (s.d_ff + s.d) * data.dtype.itemsize,
        operations=2 * 2 * s.rows * s.d * s.d_ff,
    )


def _commit(data: Data) -> Case:
    s = data.shape
    count = s.owners * s.layers
    src = data.normal(3, count, s.chunk, s.d)
    dst = data.normal(3, count + 1, s.chunk, s.d)
    sources = torch.arange(count, device=data.device)
    targets = sources.flip(0) + 1
    selected = sources % 4 != 1

    def call(commit: Callable[..., None], turn: int) -> None:
        commit(src[turn % 3], dst[turn % 3], sources, targets, selected)

    def error() -> float:
        before = dst[0].clone()
        call(data.kernel("selective_commit"), 0)
        for index, chosen in enumerate(selected.tolist()):
            if chosen:
                before[count - index] = src[0, index]
        return float(not torch.equal(dst[0], before))

    published = int(selected.sum())
    return Case(
        f"selective_commit, {published} of {count} slots of [{s.chunk}, {s.d}]",
        partial(call, data.kernel("selective_commit")),
        partial(call, eager_commit),
        error,
        EXACT,
        moved=2 * published * s.chunk * s.d * data.dtype.itemsize,
    )


def _state_bytes(data: Data) -> int:
    s = data.shape
    pages = s.rows * (s.d_ff + s.d) * data.dtype.itemsize
    return s.layers * (pages + s.d * s.d_ff * 4)


def _checkpoint_write(data: Data) -> Case:
    s = data.shape

    def call(write: Callable[..., Any], turn: int) -> Any:
        owner = turn % s.owners
        return write(data.H, data.V, data.D, data.pages_of(owner), 1 + owner, s.chunk)

    def error() -> float:
        held = call(data.kernel("checkpoint_write"), 1)
        own = slice((1 + s.pages) * s.chunk, (1 + 2 * s.pages) * s.chunk)
        wanted = (data.H[:, own], data.V[:, own], data.D[:, 2])
        pairs = zip(held[1:], wanted, strict=True)
        return float(any((a.flatten() != b.flatten()).any() for a, b in pairs))

    return Case(
        f"checkpoint_write, {s.pages} pages and a base, {s.layers} layers",
        partial(call, data.kernel("checkpoint_write")),
        partial(call, eager_checkpoint_write),
        error,
        EXACT,
        moved=2 * _state_bytes(data),
    )


def _checkpoint_read(data: Data) -> Case:
    s = data.shape
    write = data.kernel("checkpoint_write")
    held = write(data.H, data.V, data.D, data.pages_of(0), 1, s.chunk)

    def call(read: Callable[..., None], turn: int) -> None:
        owner = turn % s.owners
        read(held, data.H, data.V, data.D, data.pages_of(owner), 1 + owner, s.chunk)

    def error() -> float:
        call(data.kernel("checkpoint_read"), 2)
        again = write(data.H, data.V, data.D, data.pages_of(2), 3, s.chunk)
        pairs = zip(held[1:], again[1:], strict=True)
        return float(any((a != b).any() for a, b in pairs))

    return Case(
        f"checkpoint_read, {s.pages} pages and a base, {s.layers} layers",
        partial(call, data.kernel("checkpoint_read")),
        partial(call, eager_checkpoint_read),
        error,
        EXACT,
        moved=2 * _state_bytes(data),
    )
