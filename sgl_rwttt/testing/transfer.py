"""The check of what a snapshot is made of: a state leaves one backend and enters another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.contexts import Point, PointState
from sgl_rwttt.testing.case import Case, Item
from sgl_rwttt.testing.memory import Reading, as_bytes, some, split
from sgl_rwttt.testing.rig import Rig

Tensors = dict[str, Tensor]

_RESERVED = ("tokens", "root.", "kv.", "tail.")  # begin the names of a snapshot's other tensors


class Exported(NamedTuple):
    """A point outside of its backend."""

    point: Point
    version: Tensors
    tail: Tensors
    base: bool  # whether the version has one
    pages: int  # ... and how many pages on it
    last: Tensors  # the numbers of the last of them


def export_restore(case: Case) -> None:
    """A point goes into fresh slots of another backend and lives on there; bad tensors do not.

    The point has a base (if the case folds), pages on it (if it folds later than at once) and an
    open tail.
    """
    rig = Rig(case, "export and restore")
    branch = rig.start()
    rig.advance((branch, some(case, (max(case.fold_pages, 2) + 1) * case.chunk + 1, 1)))
    rig.store.release(branch.state)
    saved = _exported(rig, branch.items)

    other = Rig(case, rig.rule)
    decoy = other.start()
    other.advance((decoy, some(case, case.chunk + 2, 2)))  # so that the slots are others
    _check_refusals(other, saved)
    _check_last_page(other, saved)
    _resume(other, saved)
    twin = other.start(branch.items)
    other.require(len(twin.items) == len(branch.items), "the restored point is not retained")
    bits = as_bytes(other.backend.export(twin.state.version)), as_bytes(other.tail(twin))
    other.require(bits == (as_bytes(saved.version), as_bytes(saved.tail)), "other bits come back")
    other.advance((twin, some(case, 2 * case.chunk, 3)), (decoy, some(case, case.chunk, 4)))
    other.compare(twin, "a restored branch")
    other.compare(decoy, "a branch beside the restored one")


def _exported(rig: Rig, items: list[Item]) -> Exported:
    tokens, modes = split(items)
    context = ContextChain(rig.root, rig.case.chunk)
    context.sync(tokens, modes)
    found = rig.store.contexts.at("o", context, len(tokens))
    state, backend = found.version, rig.backend
    version = backend.export(state)
    tail = {} if found.tail is None else backend.export_tail(found.tail.tail.page, found.rows)
    _check_layouts(rig, found, version, tail)
    _check_copies(rig, version)
    last = backend.export(Reading(None, state.pages[-1:])) if state.pages else {}
    return Exported(found.point, version, tail, state.base is not None, len(state.pages), last)


def _check_layouts(rig: Rig, found: PointState, version: Tensors, tail: Tensors) -> None:
    state, backend = found.version, rig.backend
    rig.require(bool(version), "the state after several blocks exports nothing")
    layout = backend.layout(len(state.pages), state.base is not None)
    rig.require(_shapes(version) == layout, f"export gives {_shapes(version)}, layout {layout}")
    layout = backend.tail_layout(found.rows) if rig.case.evidence == "rows" else {}
    rig.require(_shapes(tail) == layout, f"export_tail gives {_shapes(tail)}, tail_layout {layout}")
    for name, each in (version | tail).items():
        rig.require(each.is_contiguous(), f"{name} is not contiguous")
        fits = name.startswith("tail.") if name in tail else not name.startswith(_RESERVED)
        rig.require(fits, f"{name} is no name for this tensor: see tail_layout and layout")


def _check_copies(rig: Rig, version: Tensors) -> None:
    before = rig.memory()
    kept = {name: each.clone() for name, each in version.items()}
    for each in version.values():
        each.zero_()
    rig.check_unchanged(before, set(), "writing to what export returned")
    for name, each in version.items():
        each.copy_(kept[name])


def _resume(rig: Rig, saved: Exported) -> None:
    """Publish the point as a server does that restores a context."""

    def fill(base: int | None, pages: tuple[int, ...], tail_page: int | None) -> None:
        rig.backend.restore(saved.version, base, pages)
        if tail_page is not None:
            rig.backend.restore_tail(saved.tail, tail_page)

    restore = partial(rig.backend.restore, saved.version)
    rig.store.contexts.resume("o", "pin", saved.point, restore, fill)
    rig.store.check_integrity()


def _check_last_page(rig: Rig, saved: Exported) -> None:
    """Where the older pages are still there, a restore fills the last ones alone."""
    if not saved.pages:
        return
    page = rig.pages.alloc()
    rig.backend.restore(saved.version, None, (page,))
    same = as_bytes(rig.backend.export(Reading(None, (page,)))) == as_bytes(saved.last)
    rig.require(same, "restore into one page does not fill it with the last page's numbers")
    rig.pages.free(page)


def _check_refusals(rig: Rig, saved: Exported) -> None:
    """ValueError, and no byte changed, for tensors that do not fit and for slots that are none."""
    base = rig.bases.alloc() if saved.base else None
    pages = tuple(rig.pages.alloc() for _ in range(saved.pages))
    restore, restore_tail = rig.backend.restore, rig.backend.restore_tail
    for what, wrong in _misfits(saved.version):
        _refused(rig, f"restore of {what}", partial(restore, wrong, base, pages))
    for slot in (0, -1, rig.pages.total) if pages else ():
        to = (*pages[:-1], slot)
        _refused(rig, f"restore to page {slot}", partial(restore, saved.version, base, to))
    for slot in (0, -1, rig.bases.total) if base is not None else ():
        _refused(rig, f"restore to base {slot}", partial(restore, saved.version, slot, pages))
    if saved.tail:
        page = rig.pages.alloc()
        for what, wrong in _misfits(saved.tail):
            _refused(rig, f"restore_tail of {what}", partial(restore_tail, wrong, page))
        for slot in (0, -1, rig.pages.total):
            _refused(rig, f"restore_tail to page {slot}", partial(restore_tail, saved.tail, slot))
        rig.pages.free(page)
    for slot in pages:
        rig.pages.free(slot)
    if base is not None:
        rig.bases.free(base)


def _misfits(tensors: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Each tensor in another dtype, and one number too narrow."""
    for name, each in tensors.items():
        yield f"{name} as float64", tensors | {name: each.to(torch.float64)}
        yield f"{name} too narrow", tensors | {name: each[..., :-1].contiguous()}


def _refused(rig: Rig, what: str, call: Callable[[], None]) -> None:
    before = rig.memory()
    try:
        call()
    except ValueError:
        rig.check_unchanged(before, set(), f"a refused {what}")
        return
    rig.require(False, f"no ValueError from a {what}")


def _shapes(tensors: Tensors) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
