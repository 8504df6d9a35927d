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


@dataclass(frozen=True)
class TTTOptions:
    """Sizes and rules of the state runtime, fixed when the server starts.

    Raises ValueError, naming the flag, for a value out of range.
    """

    memory_mb: int = 2048  # pool memory of delta pages and dense bases together, MiB
    dense_fraction: float = 0.25  # share of memory_mb given to dense bases
    fold_rows: int | None = (
        None  # rows after which pages fold into a base; None = crossover, 0 = never
    )

    def __post_init__(self) -> None:
        if self.memory_mb < 1:
            raise ValueError(f"--ttt-memory-mb must be at least 1, got {self.memory_mb}")
        if not 0.0 <= self.dense_fraction < 1.0:
            raise ValueError(f"--ttt-dense-fraction must be in [0, 1), got {self.dense_fraction}")
        if self.fold_rows is not None and self.fold_rows < 0:
            raise ValueError(f"--ttt-fold-rows must be 0 (never) or more, got {self.fold_rows}")

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the ``--ttt-*`` flags to ``parser``."""
    group = parser.add_argument_group("test-time training state (sgl_rwttt)")
    group.add_argument(
        "--ttt-memory-mb",
        type=int,
        default=None,
        help="MiB for the pools of delta pages and dense bases (default 2048).",
    )
    group.add_argument(
        "--ttt-dense-fraction",
        type=float,
        default=None,
        help="Share of --ttt-memory-mb for dense bases (default 0.25).",
    )
    group.add_argument(
        "--ttt-fold-rows",
        type=int,
        default=None,
        help="Rows since the last dense base after which pages fold into a new one "
        "(default: the crossover d_ff*d/(d_ff+d); 0 = never).",
    )


def publish_arguments(args: argparse.Namespace) -> None:
    """Publish the ``--ttt-*`` values of a parsed command line, if any was given."""
    given = {f"ttt_{f.name}": getattr(args, f"ttt_{f.name}", None) for f in fields(TTTOptions)}
    if any(value is not None for value in given.values()):
        TTTOptions.from_mapping(given).publish()
