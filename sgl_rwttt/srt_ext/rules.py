"""What an update rule brings to a server: its backend, pools and limits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sgl_rwttt.backends import backend_class
from sgl_rwttt.backends.in_place_config import InPlaceConfig
from sgl_rwttt.backends.lora_config import DecoderShape, LoraDeltaConfig
from sgl_rwttt.backends.lora_delta import LoraDeltaBackend
from sgl_rwttt.backends.lora_peft import adapter_digest, load_adapter
from sgl_rwttt.backends.streaming_config import StreamingConfig
from sgl_rwttt.core.segment import Evidence
from sgl_rwttt.core.slots import SlotPool

from .limits import retained_window
from .options import TTTOptions
from .snapshot_context import Shapes

RowsConfig = InPlaceConfig | StreamingConfig
RuleConfig = RowsConfig | LoraDeltaConfig


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the rule that an owner can have; of most rules there is one."""

    config: RuleConfig
    start: tuple[int, ...]  # pages outside the pool that an owner reads at first
    shape: tuple[Any, ...]  # what states must share to be in one operator group
    shapes: Shapes  # of what a snapshot holds


def only_form(pages: Sequence[int]) -> int:
    """The form of every version of a rule that has one."""
    return 0


@dataclass(frozen=True, slots=True)
class StateParts:
    """The rule's part of a runtime."""

    backend: Any  # a base.StateBackend, with its pools allocated
    pages: SlotPool
    bases: SlotPool
    fold_pages: int  # pages that a version reads before it gets a dense base; 0 = never
    evidence: Evidence
    forms: tuple[Form, ...]  # that of owners who ask for none first
    retained: int | None  # newest versions kept per lineage
    form_of: Callable[[Sequence[int]], int] = only_form  # of a version, by the pages it reads


def state_parts(
    configs: Sequence[RuleConfig], options: TTTOptions, device: torch.device
) -> StateParts:
    """Allocate the pools of one rule in its forms, the default one first.

    ValueError, naming the flag, when the pools would hold nothing.
    """
    first = configs[0]
    if isinstance(first, LoraDeltaConfig):
        return _lora_delta([c for c in configs if isinstance(c, LoraDeltaConfig)], options, device)
    return _of_rows(first, options, device)


def _of_rows(config: RowsConfig, options: TTTOptions, device: torch.device) -> StateParts:
    pages, bases = size_pools(config, options)
    backend: Any = backend_class(config.backend)(config, pages=pages, bases=bases, device=device)
    folds = fold_pages(config, options, backend.default_fold_pages)
    bases_by = "--ttt-max-bases" if bases - 1 == options.max_bases else "--ttt-dense-fraction"
    return StateParts(
        backend=backend,
        pages=_page_pool(pages, "delta page", options),
        bases=SlotPool(bases, "dense base", bases_by),
        fold_pages=folds,
        evidence="rows",
        forms=(
            Form(
                config, (), (config.rule, config.d_model, config.d_ff, str(backend.dtype)), backend
            ),
        ),
        retained=retained_window(options, folds, bases - 1),
    )


def _lora_delta(
    configs: Sequence[LoraDeltaConfig], options: TTTOptions, device: torch.device
) -> StateParts:
    largest = max(configs, key=lambda config: config.rank)
    slot_bytes = 4 * largest.adapter_numbers
    held = options.memory_mb * 1024 * 1024 // slot_bytes
    starts = len(configs)  # slots that hold what the owners of each rank start from
    slots = _at_most(held - starts, options.max_pages)
    if slots < 4:
        raise ValueError(
            f"--ttt-memory-mb={options.memory_mb} holds {held} adapters of {slot_bytes} bytes "
            f"(rank {largest.rank}, {largest.shape.layers} layers), of at least {4 + starts} needed"
        )
    backend = LoraDeltaBackend(
        configs[0], slots + 1, options.train_tokens, device, others=configs[1:]
    )
    return StateParts(
        backend=backend,
        pages=_page_pool(slots + 1, "adapter", options),
        bases=SlotPool(1, "dense base"),
        fold_pages=0,
        evidence="tokens",
        forms=tuple(
            Form(
                config,
                (backend.start + i,) if i else (),
                (config.rule, config.shape.d_model, "torch.float32"),
                backend.forms[i],
            )
            for i, config in enumerate(configs)
        ),
        retained=options.retained_versions,
        form_of=backend.form_of,
    )


def lora_configs(options: TTTOptions, hf_config: Any) -> tuple[LoraDeltaConfig, ...]:
    """The rule that ``--ttt-backend lora_delta`` asks for, once for each rank; ValueError names the
    key or parameter.

    ``--ttt-adapter`` is read once here, because every state depends on what is in it.
    """
    given: dict[str, Any] = {
        "targets": None if options.targets is None else tuple(options.targets.split(",")),
        "rank": options.ranks[0],
        "alpha": options.alpha,
        "chunk": options.chunk,
        "lr": options.lr,
        "tau": options.tau,
        "weight": options.selection_weight,
        "steps": options.steps,
        "seed": options.seed,
    }
    named = {name: value for name, value in given.items() if value is not None}
    config = LoraDeltaConfig(DecoderShape.from_hf(hf_config), **named)
    if config.chunk > options.train_tokens:
        raise ValueError(
            f"--ttt-train-tokens={options.train_tokens} does not hold a segment of "
            f"--ttt-chunk={config.chunk} tokens"
        )
    if options.adapter is not None:
        initial = adapter_digest(load_adapter(Path(options.adapter), config))
        config = replace(config, initial=initial)
    return (config, *(replace(config, rank=rank) for rank in options.ranks[1:] if rank))


def size_pools(config: RowsConfig, options: TTTOptions) -> tuple[int, int]:
    """(pages, dense bases) that fit ``--ttt-memory-mb``; raises ValueError when none would."""
    layers, chunk = len(config.layers), config.chunk
    page_bytes, base_bytes = config.page_bytes, config.base_bytes
    budget = options.memory_mb * 1024 * 1024
    share = options.dense_fraction
    if share is None:
        share = 0.9 if options.commit == "dense" else config.dense_share
    dense = 0 if options.fold_rows == 0 else int(budget * share)
    bases = _at_most(dense // base_bytes, options.max_bases)
    pages = _at_most((budget - bases * base_bytes) // page_bytes, options.max_pages)
    if pages < 4:
        raise ValueError(
            f"--ttt-memory-mb={options.memory_mb} holds {pages} delta pages of {page_bytes} bytes "
            f"({layers} layers, chunk {chunk}); at least 4 are needed"
        )
    return pages + 1, bases + 1  # slot 0 of each pool is the dummy


def fold_pages(config: RowsConfig, options: TTTOptions, default: int) -> int:
    """Pages since the last base after which a version gets a base of its own (0 = never)."""
    if options.commit == "dense":
        return 1
    if options.fold_rows is None:
        return default
    return -(-options.fold_rows // config.chunk)


def _page_pool(pages: int, name: str, options: TTTOptions) -> SlotPool:
    by_count = pages - 1 == options.max_pages
    return SlotPool(pages, name, "--ttt-max-pages" if by_count else "--ttt-memory-mb")


def _at_most(count: int, limit: int | None) -> int:
    return count if limit is None else min(count, limit)
