"""Running mean, a toy rule: each layer adds lr times the mean target of all complete chunks.

A page holds the targets of one chunk, each followed by a 1 that counts it; a base holds their sum.
"""

import torch


class Plan:  # of one forward
    retried, failed = 0, {}  # nothing is computed twice here, and nothing raises

    def __init__(self, segments):
        self.segments, self.good = segments, []

    def written_pages(self, index):
        return [b.page for b in self.segments[index].blocks if self.good[index]]

    def unchanged_pages(self, index):
        return []


class RunningMean:
    name, stateless = "running_mean", True

    def __init__(self, layers, width, chunk, lr, pages, bases, device="cpu"):
        self.chunk, self.lr = chunk, lr
        self.rows = torch.zeros(layers, pages, chunk, width + 1, device=device)
        self.sums = torch.zeros(layers, bases, width + 1, device=device)
        self.page_bytes, self.base_bytes = 4 * self.rows[:, 0].numel(), 4 * self.sums[:, 0].numel()

    def report(self):
        sizes = {"page_bytes": self.page_bytes, "base_bytes": self.base_bytes}
        return {"backend": self.name, "dtype": "float32", "lr": self.lr} | sizes

    def begin_step(self, segments):
        return Plan(segments)

    def layer_step(self, plan, slot, h, target):
        out, counted = torch.zeros_like(target), torch.nn.functional.pad(target, (0, 1), value=1.0)
        for segment, part in ((s, p) for s in plan.segments for p in s.parts):
            at, end = segment.start + part.offset, part.row + part.count
            total = self._total(slot, part.base, part.pages)
            out[at : at + part.count] = self.lr * total[:-1] / total[-1].clamp_min(1)
            if part.writes:
                self.rows[slot, part.page, part.row : end] = counted[at : at + part.count]
            if part.fold_base is not None:
                self.sums[slot, part.fold_base] = self._total(slot, *part.fold_from)
        return out

    def finish_step(self, plan):
        for segment in plan.segments:
            bases = [b.fold_base for b in segment.blocks if b.fold_base is not None]
            pages = self.rows[:, [b.page for b in segment.blocks]]
            plan.good.append(bool(pages.isfinite().all() and self.sums[:, bases].isfinite().all()))
        return plan.good

    def layout(self, pages, base):
        layers, _, chunk, width = self.rows.shape
        found = {"rows": (torch.float32, (layers, pages, chunk, width))} if pages else {}
        return found | ({"sums": (torch.float32, (layers, width))} if base else {})

    def export(self, version):
        found = {"rows": self.rows[:, list(version.pages)]} if version.pages else {}
        return found | (
            {} if version.base is None else {"sums": self.sums[:, version.base].clone()}
        )

    def restore(self, tensors, base, pages):
        count = tensors["rows"].shape[1] if "rows" in tensors else 0
        fits = len(pages) <= count and (base is None or 0 < base < self.sums.shape[1])
        self._check(fits, pages, tensors, self.layout(count, base is not None))
        if base is not None:
            self.sums[:, base] = tensors["sums"]
        if pages:
            self.rows[:, list(pages)] = tensors["rows"][:, count - len(pages) :]

    def tail_layout(self, rows):
        shape = len(self.rows), rows, self.rows.shape[3]
        return {"tail.rows": (torch.float32, shape)} if rows else {}

    def export_tail(self, page, rows):
        return {"tail.rows": self.rows[:, page, :rows].contiguous().clone()} if rows else {}

    def restore_tail(self, tensors, page):
        rows = tensors["tail.rows"].shape[1]
        self._check(rows < self.chunk, (page,), tensors, self.tail_layout(rows))
        self.rows[:, page, :rows] = tensors["tail.rows"]

    def copy_rows(self, src, dst, rows):
        self.rows[:, dst, :rows] = self.rows[:, src, :rows]

    def _total(self, slot, base, pages):
        dense = self.sums[slot, [] if base is None else [base]].sum(0)
        return dense + self.rows[slot, list(pages)].sum((0, 1))

    def _check(self, fits, pages, tensors, layout):
        given = {k: (t.dtype, tuple(t.shape)) for k, t in tensors.items() if k in layout}
        if not fits or given != layout or not all(0 < p < self.rows.shape[1] for p in pages):
            raise ValueError(f"cannot fill pages {pages}: {given}, not {layout}")
