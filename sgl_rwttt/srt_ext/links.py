"""Control messages between the tokenizer process and the schedulers of all ranks."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable
from typing import Any

from sgl_rwttt.core.errors import StateCapacity, StateError


class RankLinks:
    """Asks single ranks, and knows how many owners each had open when it last answered.

    Used on the tokenizer process's event loop only. An answer belongs to the message whose ``rid``
    it carries; that of a caller who has gone is dropped.
    """

    def __init__(self, send: Callable[[Any], None], ranks: int) -> None:
        self.ranks = ranks
        self._send = send
        self._asked: dict[str, asyncio.Future[Any]] = {}
        self._open = [0] * ranks
        self._opening = [0] * ranks  # on their way, counted by nobody yet

    async def ask(self, rank: int, op: str, packed: str) -> dict[str, Any]:
        """The answer of one rank to a verb; raises the StateError that it answers."""
        from .io import TTTControlReqInput

        message = TTTControlReqInput(rid=uuid.uuid4().hex, op=op, args=packed, rank=rank)
        answered = self._asked[message.rid] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            reply = await answered
        finally:
            del self._asked[message.rid]
        self._open[rank] = reply.owners
        payload: dict[str, Any] = json.loads(reply.payload)
        if not reply.ok:
            raise StateError.from_wire(payload)
        return payload

    def receive(self, reply: Any) -> None:
        """Hand a scheduler's answer to who waits for it."""
        answered = self._asked.get(reply.rid)
        if answered is not None and not answered.done():
            answered.set_result(reply)

    async def ask_all(self, op: str, packed: str) -> list[dict[str, Any]]:
        """The answers of all ranks, in their order; raises the first error that one answers."""
        return await asyncio.gather(*(self.ask(rank, op, packed) for rank in range(self.ranks)))

    async def open(self, packed: str) -> dict[str, Any]:
        """Open an owner where the fewest are open, on the lowest of equal ranks.

        A rank that has no place passes it on to the next; raises StateCapacity when none has any.
        """
        full: StateCapacity | None = None
        for rank in sorted(range(self.ranks), key=lambda r: self._open[r] + self._opening[r]):
            self._opening[rank] += 1
            try:
                return await self.ask(rank, "open", packed)
            except StateCapacity as error:
                full = full or error
            finally:
                self._opening[rank] -= 1
        assert full is not None
        raise full


def after_init_communicators(_result: None, manager: Any) -> None:
    """Give SGLang's tokenizer manager its links (hook on ``init_communicators``)."""
    from sglang.srt.runtime_context import get_parallel
    from sglang.utils import TypeBasedDispatcher

    from .io import TTTControlReqOutput

    manager.ttt_links = RankLinks(manager._dispatch_to_scheduler, get_parallel().num_dp_ranks)
    manager._result_dispatcher += TypeBasedDispatcher(
        [(TTTControlReqOutput, manager.ttt_links.receive)]
    )
