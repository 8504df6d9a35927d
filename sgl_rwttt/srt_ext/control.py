"""Control verbs from the tokenizer process: one call, a dict back, or the typed StateError."""

from __future__ import annotations

import asyncio
from typing import Any

from sgl_rwttt.core import faults
from sgl_rwttt.core.errors import InvalidStateRequest

from .arguments import pack, shown
from .limits import MAX_NAMES
from .links import RankLinks
from .options import TTTOptions
from .rank_answers import MERGED
from .ranks import rank_of

OPERATIONS = (
    "open",
    "renew",
    "close",
    "abort",
    "drop",
    "unpin",
    "release_root",
    "state",
    "info",
    "owners",
    "owner",
    "health",
    "save",
    "restore",
    "snapshots",
)


def operations() -> tuple[str, ...]:
    """The verbs of this process; ``fault`` only where failures may be injected."""
    return (*OPERATIONS, "fault") if faults.allowed() else OPERATIONS


async def control(tokenizer_manager: Any, op: str, args: dict[str, Any]) -> dict[str, Any]:
    """Run control verb ``op`` in the scheduler of its owner's rank, or of every rank.

    Raises InvalidStateRequest for an unknown verb and whatever StateError the scheduler answers.
    """
    if op not in operations():
        raise InvalidStateRequest(f"unknown verb {shown(op)}; known: {', '.join(operations())}")
    packed = pack(args)
    tokenizer_manager.auto_create_handle_loop()
    links: RankLinks = tokenizer_manager.ttt_links
    if op == "open":
        return await links.open(packed)
    if links.ranks > 1 and op in MERGED:
        return MERGED[op](await links.ask_all(op, packed))
    if op == "renew":
        return await _renew(links, args)
    if op == "fault" and "owner" not in args:
        return (await links.ask_all(op, packed))[0]
    return await links.ask(rank_of(args.get("owner"), links.ranks), op, packed)


async def _renew(links: RankLinks, args: dict[str, Any]) -> dict[str, Any]:
    """One renewal of owners on several ranks."""
    named = args.get("owners")
    if not isinstance(named, list) or len(named) > MAX_NAMES:
        return await links.ask(0, "renew", pack(args))  # which says what is wrong
    parts: dict[int, list[Any]] = {}
    for owner in named:
        parts.setdefault(rank_of(owner, links.ranks), []).append(owner)
    answers = await asyncio.gather(
        *(
            links.ask(rank, "renew", pack({**args, "owners": part}))
            for rank, part in (parts or {0: []}).items()
        )
    )
    unknown = {owner for answer in answers for owner in answer["unknown"]}
    return {**answers[0], "unknown": [owner for owner in named if owner in unknown]}


def serves_ttt(tokenizer_manager: Any) -> bool:
    """Whether the checkpoint is served with a rule."""
    own = bool(getattr(tokenizer_manager.model_config.hf_config, "ttt_mode", False))
    return own or TTTOptions.from_env().backend is not None
