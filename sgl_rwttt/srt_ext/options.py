"""Start-up options of the state runtime and how they reach the scheduler process.

SGLang's ``ServerArgs`` has fixed fields, so the options travel in one environment variable, which
every child process inherits.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

ENV_OPTIONS = "RWTTT_OPTIONS"
ENV_ACTIVE = "RWTTT_ACTIVE"
ENV_BOOT = "RWTTT_BOOT_ID"  # of one launch, the same for all its ranks
ENV_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE"


BACKENDS = ("lora_delta",)
MODES = ("rw", "phase", "serial")
COMMITS = ("owner", "dense")

_AT_LEAST: dict[str, float] = {
    "memory_mb": 1,
    "fold_rows": 0,
    "target_batch": 1,
    "wait_budget": 0,
    "max_owners": 1,
    "max_pages": 4,
    "max_bases": 0,
    "retained_versions": 2,
    "snapshot_mb": 1,
    "max_snapshots": 1,
    "chunk": 2,
    "steps": 1,
    "seed": 0,
    "train_tokens": 2,
}
# Options that only one kind of rule has; None, or their default, is no request.
_OF_LORA = (
    "targets",
    "rank",
    "alpha",
    "chunk",
    "lr",
    "tau",
    "selection_weight",
    "steps",
    "seed",
    "adapter",
)
_OF_ROWS = ("dense_fraction", "fold_rows", "max_bases")


@dataclass(frozen=True)
class TTTOptions:
    """Sizes, limits and rules of the state runtime, fixed when the server starts.

    None leaves a limit to the pool or the machine. Raises ValueError, naming the flag, for a value
    out of range.
    """

    memory_mb: int = 2048  # pool memory of delta pages and dense bases together, MiB
    dense_fraction: float | None = None  # share of memory_mb for bases; None = by commit
    fold_rows: int | None = None  # rows after which pages fold; None = crossover, 0 = never
    mode: str = "rw"  # how a round of decode becomes forward passes
    target_batch: int | None = None  # size of a WRITE group worth waiting for; None = everybody
    wait_budget: int = 0  # decode steps that a boundary may wait for company
    commit: str = "owner"  # "dense" folds every version into a dense base (ablation)
    max_owners: int | None = None  # open sessions
    max_pages: int | None = None  # delta pages, at most what memory_mb gives
    max_bases: int | None = None  # dense bases, at most what dense_fraction gives
    retained_versions: int | None = None  # versions kept per lineage
    owner_timeout: float | None = None  # seconds after which an idle owner is closed
    snapshot_dir: str | None = None  # folder of snapshot files; None = no snapshots
    snapshot_mb: int = 1024  # largest snapshot file, MiB
    max_snapshots: int = 64  # files in snapshot_dir
    backend: str | None = None  # rule for a checkpoint without one; None = the checkpoint's own
    targets: str | None = None  # projections with an adapter, separated by commas
    rank: str | int | None = (
        None  # of adapters, comma-separated; from here None = the rule's default
    )
    alpha: float | None = None
    chunk: int | None = None  # write-mode tokens of a segment
    lr: float | None = None
    tau: float | None = None  # loss above which a segment is learnt
    selection_weight: float | None = None  # lambda
    steps: int | None = None  # AdamW steps per boundary
    seed: int | None = None  # of the A that owners start from
    adapter: str | None = None  # PEFT folder that owners start from instead
    train_tokens: int = 4096  # padded tokens of one forward and backward of a WRITE

    def __post_init__(self) -> None:
        for field, least in _AT_LEAST.items():
            value = getattr(self, field)
            if value is not None and value < least:
                raise ValueError(f"{flag(field)} must be at least {least}, got {value}")
        fraction, timeout = self.dense_fraction, self.owner_timeout
        if fraction is not None and not 0.0 <= fraction < 1.0:
            raise ValueError(f"--ttt-dense-fraction must be in [0, 1), got {fraction}")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"--ttt-owner-timeout must be positive (seconds), got {timeout}")
        for field, known in (("mode", MODES), ("commit", COMMITS), ("backend", (None, *BACKENDS))):
            if getattr(self, field) not in known:
                given = getattr(self, field)
                raise ValueError(f"{flag(field)} must be one of {list(known)}, got {given!r}")
        if self.mode == "serial" and (self.wait_budget or self.target_batch not in (None, 1)):
            raise ValueError(
                "--ttt-mode=serial runs one owner at a time: leave --ttt-wait-budget and "
                "--ttt-target-batch out"
            )
        if self.commit == "dense" and (self.fold_rows is not None or self.max_bases == 0):
            raise ValueError(
                "--ttt-commit=dense folds every version into a dense base: leave --ttt-fold-rows "
                "and --ttt-max-bases=0 out"
            )

        self._check_rule()

    @property
    def ranks(self) -> tuple[int | None, ...]:
        """Ranks that owners may have, that of owners who ask for none first; None: the rule's.

        Raises ValueError for anything but distinct whole numbers from 1.
        """
        if self.rank is None:
            return (None,)
        words = str(self.rank).split(",")
        if not all(word.isascii() and word.isdigit() and int(word) for word in words):
            raise ValueError(f"--ttt-rank takes numbers from 1, got {self.rank!r}")
        ranks = tuple(map(int, words))
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"--ttt-rank names a rank twice: {self.rank}")
        return ranks

    def _check_rule(self) -> None:
        """Raise ValueError for an option of another rule than the one that is served."""
        lora = self.backend == "lora_delta"
        for field in _OF_ROWS if lora else _OF_LORA:
            if getattr(self, field) is not None:
                which = "cannot be combined with" if lora else "needs"
                raise ValueError(f"{flag(field)} {which} --ttt-backend=lora_delta")
        if len(self.ranks) > 1 and self.adapter is not None:
            raise ValueError("--ttt-adapter has one rank: it cannot be combined with several ranks")
        if lora and self.commit != "owner":
            raise ValueError("--ttt-commit=dense cannot be combined with --ttt-backend=lora_delta")

    @classmethod
    def from_env(cls) -> TTTOptions:
        """The options published by the launching process, or the defaults."""
        return cls(**json.loads(os.environ.get(ENV_OPTIONS, "{}")))

    @classmethod
    def from_mapping(cls, values: dict[str, Any]) -> TTTOptions:
        """Options from ``ttt_``-prefixed names; raises ValueError for an unknown one."""
        known = {f"ttt_{f.name}": f.name for f in fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ValueError(f"unknown state options {unknown}; known: {sorted(known)}")
        return cls(**{known[k]: v for k, v in values.items() if v is not None})

    def publish(self) -> None:
        """Put the options into the environment of this process and its children."""
        os.environ[ENV_OPTIONS] = json.dumps(asdict(self))


def flag(field: str) -> str:
    """The command-line flag of an option."""
    return "--ttt-" + field.replace("_", "-")


# option -> (type or choices, metavar, help)
_ARGUMENTS: dict[str, tuple[Any, str | None, str]] = {
    "memory_mb": (int, "MIB", "pools of delta pages and dense bases together (default 2048)"),
    "dense_fraction": (
        float,
        "SHARE",
        "share of --ttt-memory-mb for dense bases (default 0.25; 0.9 with --ttt-commit dense)",
    ),
    "fold_rows": (
        int,
        "ROWS",
        "rows since the last dense base after which pages fold into a new one "
        "(default: the crossover d_ff*d/(d_ff+d); 0 = never)",
    ),
    "mode": (
        MODES,
        None,
        "forward passes of a decode step: rw = one for everybody (default), phase = READ-only and "
        "boundary requests apart, serial = one owner at a time (the reference)",
    ),
    "target_batch": (
        int,
        "OWNERS",
        "largest legal group, and the size at which owners at a boundary wait no longer "
        "(default: all running owners)",
    ),
    "wait_budget": (
        int,
        "STEPS",
        "decode steps that an owner at a boundary may wait for company (default 0: none)",
    ),
    "commit": (
        COMMITS,
        None,
        "owner = a commit appends a delta page to its owner's chain (default); dense = a commit "
        "writes a whole dense copy (for comparison)",
    ),
    "max_owners": (int, "N", "open sessions; the next open is refused (default: no limit)"),
    "max_pages": (int, "N", "delta pages (default: what --ttt-memory-mb holds)"),
    "max_bases": (int, "N", "dense bases (default: what --ttt-dense-fraction holds)"),
    "retained_versions": (
        int,
        "K",
        "versions kept per lineage; rolling back further recomputes (default: what fits)",
    ),
    "owner_timeout": (
        float,
        "SECONDS",
        "idle time after which an owner is closed, unless it asked for another (default: never)",
    ),
    "snapshot_dir": (str, "FOLDER", "where snapshots are saved and read (default: none are)"),
    "snapshot_mb": (int, "MIB", "largest snapshot file (default 1024)"),
    "max_snapshots": (int, "N", "files in --ttt-snapshot-dir (default 64)"),
    "backend": (
        BACKENDS,
        None,
        "lora_delta = an adapter per owner, trained on what it reads, for any llama or qwen3 "
        "checkpoint (default: the checkpoint's own rule, ttt_mode in config.json)",
    ),
    "targets": (str, "NAMES", "lora_delta: projections, comma-separated (default q_proj,v_proj)"),
    "rank": (
        str,
        "R[,R...]",
        "lora_delta: rank (default 8), or ranks that owners may ask for, the default one first",
    ),
    "alpha": (float, "ALPHA", "lora_delta: alpha; adapters count alpha/rank times (default 16)"),
    "chunk": (int, "C", "lora_delta: write-mode tokens per segment (default 64)"),
    "lr": (float, "LR", "lora_delta: learning rate of AdamW (default 5e-5)"),
    "tau": (float, "TAU", "lora_delta: a segment is learnt when its loss is above (default 3)"),
    "selection_weight": (
        float,
        "LAMBDA",
        "lora_delta: lambda of the loss's weight, lambda exp(loss - tau) (default 0.1)",
    ),
    "steps": (int, "K", "lora_delta: AdamW steps per segment (default 1)"),
    "seed": (int, "SEED", "lora_delta: of the A that owners start from (default 0)"),
    "adapter": (str, "FOLDER", "lora_delta: PEFT adapter that owners start from (default: none)"),
    "train_tokens": (
        int,
        "TOKENS",
        "lora_delta: padded tokens of one forward and backward pass of a WRITE (default 4096)",
    ),
}

_ALIASES = {"snapshot_dir": ("--snapshot-dir",), "selection_weight": ("--ttt-lambda",)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ``--ttt-*`` flags to ``parser``."""
    group = parser.add_argument_group("test-time training state (sgl_rwttt)")
    for field, (kind, metavar, text) in _ARGUMENTS.items():
        values: dict[str, Any] = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        if metavar is not None:
            values["metavar"] = metavar
        names = (flag(field), *_ALIASES.get(field, ()))
        group.add_argument(*names, default=None, help=text, **values)


def publish_arguments(args: argparse.Namespace) -> None:
    """Publish the ``--ttt-*`` values of a parsed command line; what was published before ends."""
    given = {f"ttt_{f.name}": getattr(args, f"ttt_{f.name}", None) for f in fields(TTTOptions)}
    TTTOptions.from_mapping(given).publish()
