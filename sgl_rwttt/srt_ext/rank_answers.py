"""Answers of all data-parallel ranks to one verb, as one answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .limits import MAX_ROWS

Answer = dict[str, Any]

_OF_RANK = (
    "sessions",
    "running",
    "integrity_checked",
    "integrity_error",
    "pools",
    "store",
    "counters",
    "planner",
)


def info(answers: Sequence[Answer]) -> Answer:
    """Counts of all ranks together, each rank's own under ``dp_ranks``; sizes are of one rank."""
    first = answers[0]
    return {
        **first,
        "sessions": sum(each["sessions"] for each in answers),
        "running": sum(each["running"] for each in answers),
        "integrity_checked": all(each["integrity_checked"] for each in answers),
        "integrity_error": _first([each["integrity_error"] for each in answers]),
        "store": _sums([each["store"] for each in answers]),
        "counters": _sums([each["counters"] for each in answers]),
        "planner": _planner([each["planner"] for each in answers]),
        "dp_ranks": _numbered([{key: each[key] for key in _OF_RANK} for each in answers]),
    }


def owners(answers: Sequence[Answer]) -> Answer:
    """The owners of all ranks, oldest first, each with its ``dp_rank``."""
    rows = [{**row, "dp_rank": rank} for rank, each in enumerate(answers) for row in each["owners"]]
    rows.sort(key=lambda row: -row["age_s"])
    return {
        "owners": rows[:MAX_ROWS],
        "count": sum(each["count"] for each in answers),
        "truncated": len(rows) > MAX_ROWS or any(each["truncated"] for each in answers),
    }


def health(answers: Sequence[Answer]) -> Answer:
    """Ok when every rank is; ledgers together, and each rank's answer under ``dp_ranks``."""
    bad = [each for each in answers if each["status"] != "ok"]
    ledgers = [each["ledger"] for each in answers]
    return {
        **(bad or answers)[0],
        "integrity_checked": all(each["integrity_checked"] for each in answers),
        "running": sum(each["running"] for each in answers),
        "ledger": {pool: _sums([each[pool] for each in ledgers]) for pool in ledgers[0]},
        "dp_ranks": _numbered(answers),
    }


def _numbered(answers: Sequence[Answer]) -> list[Answer]:
    return [{"dp_rank": rank, **each} for rank, each in enumerate(answers)]


def _sums(tables: Sequence[dict[str, int]]) -> dict[str, int]:
    return {key: sum(table[key] for table in tables) for key in tables[0]}


def _planner(tables: Sequence[Answer]) -> Answer:
    """Settings are the same everywhere; of waits the longest counts."""
    counted = ("rounds", "forwards", "rows", "held")
    return {
        **tables[0],
        **{key: sum(table[key] for table in tables) for key in counted},
        "max_wait": max(table["max_wait"] for table in tables),
    }


def _first(errors: Sequence[str | None]) -> str | None:
    return next((error for error in errors if error is not None), None)


MERGED: dict[str, Callable[[Sequence[Answer]], Answer]] = {
    "info": info,
    "owners": owners,
    "health": health,
}
