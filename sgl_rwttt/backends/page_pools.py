"""Memory of the In-Place rule: pages of (H, V) rows and dense bases, over all state layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sgl_rwttt.backends.in_place_config import InPlaceConfig
from sgl_rwttt.backends.in_place_plan import page_runs
from sgl_rwttt.backends.memory import Layout, check_tensors

STATE_DTYPES = (torch.float32, torch.bfloat16)


def all_finite(values: Tensor) -> Tensor:
    """Bool [G]: whether values [L, G, C, width] are finite for each g.

    A sum is finite exactly if its terms are, as long as it cannot overflow: hence float64.
    """
    return values.flatten(2).sum(2, dtype=torch.float64).isfinite().all(0)


class Readable(Protocol):
    """What names a version's memory: a version or a state view of the store."""

    @property
    def base(self) -> int | None:
        """Slot of the dense base."""
        ...

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages since the base, oldest first."""
        ...


class PagePools:
    """The tensors behind page and base slots; slot 0 of either is the dummy and counts.

    H [L, pages * C, d_ff] and V [L, pages * C, d] in ``dtype`` (float32, or bfloat16 for half the
    memory); D [L, bases, d, d_ff] in float32. V carries the learning rate; in an open page it holds
    the targets instead. Who may use which slot is not known here.
    """

    def __init__(
        self,
        config: InPlaceConfig,
        pages: int,
        bases: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Allocate zeroed pools; ValueError for another dtype or no room for the dummies."""
        if dtype not in STATE_DTYPES:
            raise ValueError(f"state dtype {dtype}; allowed: {', '.join(map(str, STATE_DTYPES))}")
        if pages < 1 or bases < 1:
            raise ValueError(f"{pages} pages, {bases} bases; each pool needs its dummy slot 0")
        self.config, self.pages, self.bases = config, pages, bases
        self.device, self.dtype = torch.device(device), dtype
        depth, rows = len(config.layers), pages * config.chunk
        place: dict[str, Any] = {"dtype": dtype, "device": self.device}
        # Made as ordinary tensors even when the caller builds the model in inference mode.
        with torch.inference_mode(False):
            self.H = torch.zeros(depth, rows, config.d_ff, **place)
            self.V = torch.zeros(depth, rows, config.d_model, **place)
            self.D = torch.zeros(
                depth, bases, config.d_model, config.d_ff, dtype=torch.float32, device=self.device
            )

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        c = self.config
        return len(c.layers) * c.chunk * (c.d_ff + c.d_model) * self.dtype.itemsize

    @property
    def base_bytes(self) -> int:
        """Bytes of one dense base, all layers."""
        return len(self.config.layers) * self.config.d_ff * self.config.d_model * 4

    @property
    def default_fold_pages(self) -> int:
        """Pages since the base at which reading a dense base costs less than reading the pages."""
        c = self.config
        return -(-(c.d_ff * c.d_model) // ((c.d_ff + c.d_model) * c.chunk))

    def copy_rows(self, src: int, dst: int, rows: int) -> None:
        """Copy the first ``rows`` rows of page ``src`` to page ``dst``, all layers."""
        chunk = self.config.chunk
        if not (0 < src < self.pages and 0 < dst < self.pages and 0 <= rows <= chunk):
            raise ValueError(f"cannot copy {rows} rows of page {src} to page {dst}")
        for pool in (self.H, self.V):
            pool[:, dst * chunk : dst * chunk + rows] = pool[:, src * chunk : src * chunk + rows]

    def dense(self, version: Readable, slot: int) -> Tensor:
        """Return what a version adds to W_0 at a layer slot, [d, d_ff], a new float32 tensor."""
        H, V = self.H[slot], self.V[slot]
        total = torch.zeros(self.config.d_model, self.config.d_ff, device=self.device)
        if version.base is not None:
            total += self.D[slot, version.base]
        for first, end in page_runs(version.pages, self.config.chunk):
            total += V[first:end].float().T @ H[first:end].float()
        return total

    def layout(self, pages: int, base: bool) -> Layout:
        """Dtype and shape of each tensor that `export` returns for so many pages and a base."""
        c = self.config
        depth, rows = len(c.layers), pages * c.chunk
        found: Layout = {}
        if base:
            found["D"] = torch.float32, (depth, c.d_model, c.d_ff)
        if pages:
            found["H"] = self.dtype, (depth, rows, c.d_ff)
            found["V"] = self.dtype, (depth, rows, c.d_model)
        return found

    def export(self, version: Readable) -> dict[str, Tensor]:
        """Return contiguous copies of a version's base, D [L, d, d_ff], and of its pages,
        H [L, R, d_ff] and V [L, R, d], R = pages * C; what it has none of is left out.
        """
        tensors: dict[str, Tensor] = {}
        if version.base is not None:
            tensors["D"] = self.D[:, version.base].clone(memory_format=torch.contiguous_format)
        runs = page_runs(version.pages, self.config.chunk)
        for name, pool in (("H", self.H), ("V", self.V)) if runs else ():
            tensors[name] = torch.cat([pool[:, first:end] for first, end in runs], dim=1)
        return tensors

    @torch.no_grad()
    def restore(
        self, tensors: Mapping[str, Tensor], base: int | None, pages: Sequence[int]
    ) -> None:
        """Put what `export` returned into a base (D, when `base` is given) and into pages.

        `pages` take the last ``len(pages)`` pages of H and V. Tensors of another device are copied
        to the pools'. Raises ValueError, changing nothing, for slots outside the pools or tensors
        of another dtype or shape.
        """
        chunk = self.config.chunk
        count = tensors["H"].shape[1] // chunk if "H" in tensors else 0
        self._check_layout(tensors, count, base, pages)
        if base is not None:
            self.D[:, base] = tensors["D"].to(self.device)
        at = (count - len(pages)) * chunk
        for first, end in page_runs(pages, chunk):
            for pool, rows in ((self.H, tensors["H"]), (self.V, tensors["V"])):
                pool[:, first:end] = rows[:, at : at + end - first].to(self.device)
            at += end - first

    def tail_layout(self, rows: int) -> Layout:
        """Dtype and shape of each tensor that `export_tail` returns for so many rows."""
        if not rows:
            return {}
        c = self.config
        depth = len(c.layers)
        return {
            "tail.H": (self.dtype, (depth, rows, c.d_ff)),
            "tail.T": (self.dtype, (depth, rows, c.d_model)),
        }

    def export_tail(self, page: int, rows: int) -> dict[str, Tensor]:
        """Return contiguous copies of an open page's first rows: H [L, rows, d_ff] and the targets
        T [L, rows, d].
        """
        first = page * self.config.chunk
        rows_of = slice(first, first + rows)
        pools = (self.H, self.V)
        return {
            name: pool[:, rows_of].clone(memory_format=torch.contiguous_format)
            for name, pool in zip(self.tail_layout(rows), pools, strict=False)
        }

    @torch.no_grad()
    def restore_tail(self, tensors: Mapping[str, Tensor], page: int) -> None:
        """Put what `export_tail` returned into the first rows of an open page.

        Raises ValueError, changing nothing, for a page outside the pool or tensors of another
        dtype or shape.
        """
        rows = tensors["tail.H"].shape[1] if "tail.H" in tensors else 0
        layout = self.tail_layout(rows)
        fits = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()} == layout
        if not (fits and 0 < page < self.pages and 0 < rows < self.config.chunk):
            raise ValueError(f"cannot fill {rows} rows of page {page}")
        first = page * self.config.chunk
        for pool, name in ((self.H, "tail.H"), (self.V, "tail.T")):
            pool[:, first : first + rows] = tensors[name].to(self.device)

    def _check_layout(
        self, tensors: Mapping[str, Tensor], count: int, base: int | None, pages: Sequence[int]
    ) -> None:
        in_pool = base is None or 0 < base < self.bases
        if not in_pool or not all(0 < page < self.pages for page in pages):
            raise ValueError(f"cannot fill base {base} and pages {list(pages)}")
        if len(pages) > count:
            raise ValueError(f"{count} pages cannot fill {len(pages)}")
        check_tensors(tensors, self.layout(count, base is not None))

    def tail(self, page: int, rows: int, slot: int) -> tuple[Tensor, Tensor]:
        """Return copies of an open page's evidence at a layer slot: h rows, target rows."""
        first = page * self.config.chunk
        end = first + rows
        return self.H[slot, first:end].clone(), self.V[slot, first:end].clone()

    def poison(self, page: int) -> None:
        """Fill a page with NaN, all layers (tests mark free memory with it)."""
        first = page * self.config.chunk
        self.H[:, first : first + self.config.chunk] = torch.nan
        self.V[:, first : first + self.config.chunk] = torch.nan

    def poison_base(self, base: int) -> None:
        """Fill a base with NaN, all layers."""
        self.D[:, base] = torch.nan

    def finite(self, pool: Tensor, pages: Sequence[int]) -> list[bool]:
        """Per page of ``pool`` (H or V), whether every number in it is finite, all layers."""
        depth, _, width = pool.shape
        chunk = self.config.chunk
        parts = [
            all_finite(pool[:, first:end].view(depth, -1, chunk, width))
            for first, end in page_runs(pages, chunk)
        ]
        return [bool(ok) for ok in torch.cat(parts).tolist()] if parts else []

    def _by_page(self, pool: Tensor) -> Tensor:
        """One layer's pool as [pages, C, width]."""
        return pool.view(self.pages, self.config.chunk, -1)
