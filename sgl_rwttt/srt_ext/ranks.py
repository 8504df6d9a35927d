"""Which data-parallel rank an owner lives on: its id says so.

Every rank is a scheduler process with a store, pools and a radix cache of its own, so all requests
and verbs of an owner go to one of them. The rank is a function of the id, and nobody keeps a table:
an id that nobody gave out leads to a rank that does not know it.
"""

from __future__ import annotations

import os
import re
import secrets
from itertools import pairwise

ENV_BIND = "SGLANG_CPU_OMP_THREADS_BIND"

_ID = re.compile(r"[0-9a-f]{32}")


def rank_of(owner: object, ranks: int) -> int:
    """The rank of an owner, of ``ranks``; 0 for what is no id, whose refusal is the same there."""
    if isinstance(owner, str) and _ID.fullmatch(owner):
        return int(owner, 16) % ranks
    return 0


def new_owner(rank: int, ranks: int) -> str:
    """The id of an owner that lives on ``rank``: 128 random bits, drawn until they say so."""
    while rank_of(owner := secrets.token_hex(16), ranks) != rank:
        pass
    return owner


def own_rank() -> tuple[int, int]:
    """(rank, number of ranks) of this scheduler process."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return (parallel.dp_rank or 0) if parallel.num_dp_ranks > 1 else 0, parallel.num_dp_ranks


def shares(cpus: list[int], ranks: int) -> str:
    """CPU ids of each rank, neighbours together, as `ENV_BIND` wants them: ``0,1|2,3``.

    With more ranks than CPUs some share one.
    """
    if len(cpus) < ranks:
        return "|".join(str(cpus[rank % len(cpus)]) for rank in range(ranks))
    cuts = [rank * len(cpus) // ranks for rank in range(ranks + 1)]
    return "|".join(",".join(map(str, cpus[a:b])) for a, b in pairwise(cuts))


_bound: str | None = None  # what `bind_cpus` has set


def is_bound() -> bool:
    """Whether `bind_cpus` set what the environment says now, for an engine of this process."""
    return _bound is not None and os.environ.get(ENV_BIND) == _bound


def bind_cpus(ranks: int) -> None:
    """Say which CPUs each rank may use, where SGLang does not know: more ranks than NUMA nodes.

    Modifies ``os.environ``; a value that the user set stays, one of an earlier engine of this
    process ends.
    """
    global _bound
    if is_bound():
        del os.environ[ENV_BIND]
    _bound = None
    if ranks == 1 or ENV_BIND in os.environ:
        return
    from sglang.srt.utils.common import get_cpu_ids_by_node

    nodes = get_cpu_ids_by_node()
    if ranks > len(nodes):
        _bound = shares([int(cpu) for node in nodes for cpu in node.split(",")], ranks)
        os.environ[ENV_BIND] = _bound
