"""What a program can ask of its state without moving it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from .cancellation import in_thread
from .executor import StateExecutor
from .ledger import Ledger, Lineage
from .text import HOLE
from .upstream import ProgramState


class Observable(ProgramState):
    """Names, numbers and text of a state. All but the iterators wait for what is queued."""

    stream_executor: StateExecutor

    @property
    def owner(self) -> str:
        """Session id of the run; opens the session when nothing was said yet."""
        return self.stream_executor.owner.id

    @property
    def branch(self) -> str | None:
        """Request id of the newest node; None at the root of a context."""
        self.sync()
        node = self.stream_executor.cursor.node
        return None if node is None else node.rid

    @property
    def version(self) -> int:
        """Version number behind the last token, pending text not counted (so the next three)."""
        return self._ledger().clock.number

    @property
    def tail(self) -> int:
        """Write-mode tokens since the last boundary."""
        return self._ledger().clock.rows

    @property
    def position(self) -> int:
        """Tokens of the context."""
        return len(self._ledger())

    @property
    def state_id(self) -> str:
        """Identity of the state (hex): equal ids, equal state."""
        return self._ledger().clock.state_id.hex()

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the context."""
        return tuple(self._ledger().tokens)

    @property
    def mode(self) -> str:
        """ "write" or "read"."""
        self.sync()
        return self.stream_executor.mode.value

    @property
    def lineage(self) -> Lineage:
        """What the state is a function of."""
        self.sync()
        return self.stream_executor.cursor.lineage

    @property
    def pending(self) -> str:
        """Text that the program added and no node has consumed yet."""
        self.sync()
        executor = self.stream_executor
        cursor = executor.cursor
        return executor.backend.text.decode(cursor.pending_ids) + cursor.pending_text

    def memory(self) -> dict[str, int]:
        """What the owner holds on the server, all its branches together.

        `pages` and `bases` (slots) and `state_bytes` are what its running branches, roots and pins
        read, each once; `own_pages`, `own_bases`, `own_bytes` what nobody else reads.
        `context_tokens` are the tokens of its requests, each once; the server keeps their KV,
        `kv_bytes` at most, while it has room.
        """
        executor = self.stream_executor
        args = {"owner": executor.owner.id, "memory": True}
        held = executor.ask(lambda: executor.backend.transport.control("owner", args))
        return dict(held["memory"])

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text (or one variable) as it grows; raises the run's error at its end."""
        executor = self.stream_executor
        if not executor.stream:
            yield executor.text() if var_name is None else executor.get_var(var_name)
            return
        said, seen, is_done = 0, 0, False
        while not is_done:
            text, is_done = executor.await_growth(var_name, seen)
            seen = len(text)
            said = min(said, seen)  # the program went back
            ready = seen if is_done else len(text.rstrip(HOLE))  # the next gen may complete it
            if ready > said:
                yield text[said:ready]
                said = ready
        if executor.error_ is not None:
            executor.sync()

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """As `text_iter`, in an event loop; with `return_meta_data`, (text, meta_info) pairs."""
        parts = self.text_iter(var_name)
        while (part := await in_thread(partial(next, parts, None))) is not None:
            if return_meta_data:
                yield part, self.stream_executor.meta_info.get(var_name or "")
            else:
                yield part

    def _ledger(self) -> Ledger:
        self.sync()
        return self.stream_executor.cursor.ledger
