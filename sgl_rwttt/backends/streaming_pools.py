"""Memory of the TTT-Linear rule: pages of mini-batch rows and dense states, over all layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_rwttt.backends.memory import Layout, check_tensors
from sgl_rwttt.backends.page_pools import Readable
from sgl_rwttt.backends.streaming_config import StreamingConfig


class StreamingPools:
    """The tensors behind page and base slots, all float32.

    A page holds the rows of one mini-batch: k and y = lambda g in K and Y [L, pages * C, d], and
    the inputs of the short convolutions in X [L, pages * C + bases * M, convolved * d]. A base
    holds one version: W [L, bases, heads, f, f], b [L, bases, heads, f], and in the last rows of X
    the M convolution inputs before its boundary, oldest first. Base 0 is never handed out and
    holds the model's own W and b (a version without base); page 0 is the dummy.
    """

    def __init__(
        self, config: StreamingConfig, pages: int, bases: int, device: torch.device | str = "cpu"
    ) -> None:
        """Allocate zeroed pools; ValueError when there is no room for the reserved slots."""
        if pages < 1 or bases < 1:
            raise ValueError(f"{pages} pages, {bases} bases; each pool needs its slot 0")
        self.config, self.pages, self.bases = config, pages, bases
        self.device, self.dtype = torch.device(device), torch.float32
        c, depth, f = config, len(config.layers), config.head_dim
        place: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        with torch.inference_mode(False):
            self.K = torch.zeros(depth, pages * c.chunk, c.d_model, **place)
            self.Y = torch.zeros(depth, pages * c.chunk, c.d_model, **place)
            rows = pages * c.chunk + bases * c.memory
            self.X = torch.zeros(depth, rows, c.convolved * c.d_model, **place)
            self.W = torch.zeros(depth, bases, c.heads, f, f, **place)
            self.b = torch.zeros(depth, bases, c.heads, f, **place)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return self.config.page_bytes

    @property
    def base_bytes(self) -> int:
        """Bytes of one version, all layers."""
        return self.config.base_bytes

    @property
    def default_fold_pages(self) -> int:
        """Every version is dense: the state does not grow with the context."""
        return 1

    def copy_rows(self, src: int, dst: int, rows: int) -> None:
        """Copy the first ``rows`` rows of page ``src`` to page ``dst``, all layers."""
        chunk = self.config.chunk
        if not (0 < src < self.pages and 0 < dst < self.pages and 0 <= rows <= chunk):
            raise ValueError(f"cannot copy {rows} rows of page {src} to page {dst}")
        for pool in (self.K, self.Y, self.X):
            pool[:, dst * chunk : dst * chunk + rows] = pool[:, src * chunk : src * chunk + rows]

    def memory_rows(
        self, page: int, rows: int, base: int | None, pages: Sequence[int]
    ) -> list[int]:
        """Rows of X with the M convolution inputs before a token, oldest first.

        The token follows ``rows`` rows of ``page`` and, before these, version (base, pages).
        """
        chunk, m = self.config.chunk, self.config.memory
        found = [page * chunk + i for i in range(max(0, rows - m), rows)]
        missing = m - len(found)
        if pages:
            end = (pages[-1] + 1) * chunk
            return [*range(end - missing, end), *found]
        end = self.pages * chunk + ((base or 0) + 1) * m
        return [*range(end - missing, end), *found]

    def layout(self, pages: int, base: bool) -> Layout:
        """Dtype and shape of each tensor that `export` returns for so many pages and a base."""
        c = self.config
        depth, f, rows = len(c.layers), c.head_dim, pages * c.chunk
        shapes: dict[str, tuple[int, ...]] = {}
        if base:
            shapes["W"] = (depth, c.heads, f, f)
            shapes["b"] = (depth, c.heads, f)
            if c.memory:
                shapes["M"] = (depth, c.memory, c.convolved * c.d_model)
        if pages:
            shapes["K"] = shapes["Y"] = (depth, rows, c.d_model)
            if c.convolved:
                shapes["X"] = (depth, rows, c.convolved * c.d_model)
        return {name: (torch.float32, shape) for name, shape in shapes.items()}

    def export(self, version: Readable) -> dict[str, Tensor]:
        """Return contiguous copies of a version's base and of its pages; see `layout`."""
        found: dict[str, Tensor] = {}
        if version.base is not None:
            found["W"] = self.W[:, version.base].clone(memory_format=torch.contiguous_format)
            found["b"] = self.b[:, version.base].clone(memory_format=torch.contiguous_format)
            found["M"] = self.X[:, self._base_rows(version.base)].clone()
        if version.pages:
            rows = self._page_rows(version.pages)
            found |= {name: getattr(self, name)[:, rows] for name in ("K", "Y", "X")}
        return {
            name: found[name] for name in self.layout(len(version.pages), version.base is not None)
        }

    @torch.no_grad()
    def restore(
        self, tensors: Mapping[str, Tensor], base: int | None, pages: Sequence[int]
    ) -> None:
        """Put what `export` returned into a base (when given) and into the last pages of it.

        Raises ValueError, changing nothing, for slots outside the pools or tensors of another
        dtype or shape.
        """
        chunk = self.config.chunk
        count = tensors["K"].shape[1] // chunk if "K" in tensors else 0
        self._check_layout(tensors, count, base, pages)
        if base is not None:
            self.W[:, base] = tensors["W"].to(self.device)
            self.b[:, base] = tensors["b"].to(self.device)
            if self.config.memory:
                self.X[:, self._base_rows(base)] = tensors["M"].to(self.device)
        if pages:
            rows, skipped = self._page_rows(pages), (count - len(pages)) * chunk
            for name in self.layout(count, False):
                getattr(self, name)[:, rows] = tensors[name][:, skipped:].to(self.device)

    def tail_layout(self, rows: int) -> Layout:
        """Dtype and shape of each tensor that `export_tail` returns for so many rows."""
        if not rows:
            return {}
        c = self.config
        row = {"tail.K": c.d_model, "tail.Y": c.d_model, "tail.X": c.convolved * c.d_model}
        return {k: (torch.float32, (len(c.layers), rows, size)) for k, size in row.items() if size}

    def export_tail(self, page: int, rows: int) -> dict[str, Tensor]:
        """Return contiguous copies of an open page's first rows: k, y and convolution inputs."""
        first = page * self.config.chunk
        return {
            name: getattr(self, name[-1])[:, first : first + rows].clone(
                memory_format=torch.contiguous_format
            )
            for name in self.tail_layout(rows)
        }

    @torch.no_grad()
    def restore_tail(self, tensors: Mapping[str, Tensor], page: int) -> None:
        """Put what `export_tail` returned into the first rows of an open page.

        Raises ValueError, changing nothing, for a page outside the pool or tensors of another
        dtype or shape.
        """
        rows = tensors["tail.K"].shape[1] if "tail.K" in tensors else 0
        fits = {
            name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()
        } == self.tail_layout(rows)
        if not (fits and 0 < page < self.pages and 0 < rows < self.config.chunk):
            raise ValueError(f"cannot fill {rows} rows of page {page}")
        first = page * self.config.chunk
        for name, rows_of in tensors.items():
            getattr(self, name[-1])[:, first : first + rows] = rows_of.to(self.device)

    def _check_layout(
        self, tensors: Mapping[str, Tensor], count: int, base: int | None, pages: Sequence[int]
    ) -> None:
        in_pool = base is None or 0 < base < self.bases
        if not in_pool or not all(0 < page < self.pages for page in pages) or len(pages) > count:
            raise ValueError(f"cannot fill base {base} and pages {list(pages)} from {count} pages")
        check_tensors(tensors, self.layout(count, base is not None))

    def poison(self, page: int) -> None:
        """Fill a page with NaN, all layers (tests mark free memory with it)."""
        for pool in (self.K, self.Y, self.X):
            pool[:, self._page_rows((page,))] = torch.nan

    def poison_base(self, base: int) -> None:
        """Fill a base with NaN, all layers; not base 0, which holds the model's own state."""
        if base:
            self.W[:, base] = self.b[:, base] = torch.nan
            self.X[:, self._base_rows(base)] = torch.nan

    def _page_rows(self, pages: Sequence[int]) -> Tensor:
        chunk = self.config.chunk
        first = torch.tensor(pages, dtype=torch.int64, device=self.device) * chunk
        return (first[:, None] + torch.arange(chunk, device=self.device)).reshape(-1)

    def _base_rows(self, base: int) -> slice:
        m = self.config.memory
        first = self.pages * self.config.chunk + base * m
        return slice(first, first + m)
