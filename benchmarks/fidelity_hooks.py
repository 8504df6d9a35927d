"""A plugin of SGLang's scheduler process for check_fidelity.py: forced tokens, broken rules.

fidelity_worker.py announces it as an entry point of the group ``sglang.srt.plugins``, and tells it
what to do in a file (`Orders`) that is read again whenever it changes. It is no part of the
product: it shows that the gates see a product that breaks a rule.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ENV_ORDERS = "RWTTT_FIDELITY_ORDERS"
RATE = 1.01  # of `rate`

RULES: dict[str, str] = {
    "page-dropped": "READ leaves out the oldest page since the base",
    "stale-version": "READ leaves out the newest page",
    "neighbour-read": "a decode step reads the version of the next owner in the batch",
    "neighbour-write": "V goes to the next page of the WRITE group",
    "written-twice": "V counts twice",
    "rate": "the learning rate is 1 % too large",
    "no-convolution": "V is made from the targets themselves",
    "row-lost": "the first token of every chunk teaches nothing",
    "fold-incomplete": "a dense base is made without its newest page",
}
"""What can be broken, one rule at a time."""


class Orders:
    """What the worker asks for: the tokens of each request, and the rule to break."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, -1
        self.rule: str | None = None
        self.tokens: dict[str, list[int]] = {}

    def fresh(self) -> Orders:
        """These orders, as the file has them now."""
        changed = self._path.stat().st_mtime_ns
        if changed != self._read:
            given = json.loads(self._path.read_text(encoding="utf-8"))
            self.rule, self.tokens, self._read = given["rule"], given["tokens"], changed
        return self


def write_orders(path: Path, rule: str | None, tokens: dict[str, list[int]]) -> None:
    """Replace the orders; ``tokens`` are those of each request's whole context, by rid."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"rule": rule, "tokens": tokens}), encoding="utf-8")
    new.replace(path)


def register() -> None:
    """Called by SGLang in each of its processes; acts in the scheduler's alone."""
    is_child = multiprocessing.parent_process() is not None
    if not is_child or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    orders = Orders(Path(os.environ[ENV_ORDERS]))
    force_tokens(orders)
    break_rules(lambda: orders.fresh().rule)


def force_tokens(orders: Orders) -> None:
    """Have every request go on with the token that the orders name, whatever the model prefers.

    The log-probabilities that are returned are the model's own, of the forced token.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    forced: list[Any] = []

    def sample(original: Callable[..., Any], runner: Any, logits: Any, batch: Any) -> Any:
        import torch

        known, lengths = orders.fresh().tokens, batch.seq_lens_cpu.tolist()
        rows = [
            (known.get(rid) or [0] * (length + 1))[length]
            for rid, length in zip(batch.rids, lengths, strict=True)
        ]
        forced[:] = [torch.tensor(rows, device=logits.next_token_logits.device)]
        original(runner, logits, batch)
        return forced[0].clone()

    def with_forced(*args: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (*args[:-1], forced[0]), {}

    where = "sglang.srt.model_executor.model_runner.ModelRunner.sample"
    HookRegistry.register(where, sample, HookType.AROUND)
    where = "sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs"
    HookRegistry.register(where, with_forced, HookType.BEFORE)


@contextmanager
def breaking(rule: Callable[[], str | None]) -> Iterator[None]:
    """`break_rules` for the length of a block."""
    undo = break_rules(rule)
    try:
        yield
    finally:
        for owner, name, original in undo:
            setattr(owner, name, original)


def break_rules(rule: Callable[[], str | None]) -> list[tuple[Any, str, Any]]:
    """Put wrappers around the In-Place rule that break what ``rule()`` names, at each call.

    Returns what was there before: (owner, attribute, value). AttributeError when the product has
    no such attribute any more.
    """
    from sgl_rwttt.backends import in_place, in_place_plan

    replaced = [
        (in_place, "read_parts", _read_parts),
        (in_place.InPlaceBackend, "_candidate", _candidate),
        (in_place_plan, "page_runs", _page_runs),
    ]
    undo = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for (owner, name, wrap), (_, _, original) in zip(replaced, undo, strict=True):
        setattr(owner, name, wrap(original, rule))
    return undo


def _read_parts(original: Any, rule: Callable[[], str | None]) -> Any:
    """Which versions the rows of a forward pass read."""

    def read_parts(segments: Sequence[Any]) -> Any:
        parts, broken = original(segments), rule()
        if broken == "neighbour-read" and all(len(each) == 1 for each in parts):
            others = [*parts[1:], *parts[:1]]
            return tuple(
                (mine[0]._replace(base=other[0].base, pages=other[0].pages),)
                for mine, other in zip(parts, others, strict=True)
            )
        kept = {"page-dropped": slice(1, None), "stale-version": slice(None, -1)}.get(broken or "")
        if kept is None:
            return parts
        return tuple(tuple(p._replace(pages=p.pages[kept]) for p in each) for each in parts)

    return read_parts


def _candidate(original: Any, rule: Callable[[], str | None]) -> Any:
    """The V of a WRITE group at one layer."""

    def candidate(backend: Any, slot: int, pages: Any) -> Any:
        broken = rule()
        if broken == "no-convolution":
            weights = conv, proj = backend._weights[slot]
            alone = conv.new_zeros(conv.shape)
            alone[:, 2] = 1.0  # the tap at the token itself
            backend._weights[slot] = (alone, proj)
            try:
                return original(backend, slot, pages)
            finally:
                backend._weights[slot] = weights
        values = original(backend, slot, pages)
        if broken == "neighbour-write":
            return values.roll(1, 0)
        if broken == "row-lost":
            values[:, 0] = 0.0
        return values * {"written-twice": 2.0, "rate": RATE}.get(broken or "", 1.0)

    return candidate


def _page_runs(original: Any, rule: Callable[[], str | None]) -> Any:
    """The pages of a fold, as rows of the pools."""

    def page_runs(pages: Sequence[int], chunk: int) -> Any:
        return original(pages[:-1] if rule() == "fold-incomplete" else pages, chunk)

    return page_runs
