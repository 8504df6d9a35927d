"""The first requests of the branches of one fork go to the server as one batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple

from sgl_rwttt.core.errors import ServerGone, StateError

from .answer import finish_reason
from .sampling import REQUEST_FIELDS
from .transport import Json, Transport, checked

WAIT_S = 0.02  # how long the requests that have come wait for the next one
_NEVER = 1 << 30  # stream_interval, in tokens, of a request whose growth nobody watches
_ALONE = object()


class _Request(NamedTuple):
    number: int  # of the branch
    payload: Json
    put: Callable[[Any], None]  # takes an item of the answer, or what ends it


class Siblings:
    """The gate that the branches of one fork pass with their first request, in one batch.

    Who waits: only first requests, for siblings that may still send one of their own. They stop
    waiting when all of these have come, failed, ended, gone elsewhere, or were passed over by a
    broadcast (`expect`), and when none of that has happened for `WAIT_S`: after at most
    n * WAIT_S in a fork of n. Then the gate is closed for good, and whoever comes later sends
    alone. Nobody waits for another's answer: a thread reads the batch and hands each item to its
    branch as it comes.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seats = 0
        self._awaited: set[Seat] = set()
        self._joined: list[_Request] = []
        self._is_open = True

    def seat(self) -> Seat:
        """The place of one more branch."""
        seat = Seat(self, self._seats)
        self._seats += 1
        self._awaited.add(seat)
        return seat

    def expect(self, seats: Iterable[Seat | None]) -> None:
        """Wait for no branch but these: they were asked for something at once, others were not."""
        with self._changed:
            self._await_only(set(seats))

    def leave(self, seat: Seat) -> None:
        """This branch sends nothing that could go with the batch. Idempotent."""
        with self._changed:
            self._await_only(self._awaited - {seat})

    def join(self, seat: Seat, transport: Transport, payload: Json) -> Iterator[Json] | None:
        """Send `payload` with the others; the growing answer, None when it has to go alone.

        The iterator raises StateError: this request's own error, or that of a lost server.
        """
        items: SimpleQueue[Any] = SimpleQueue()
        with self._changed:
            self._await_only(self._awaited - {seat})
            if not (self._is_open and self._fits(payload)):
                return None
            if not self._joined:
                if not self._awaited:
                    self._is_open = False
                    return None
                reader = threading.Thread(
                    target=self._run, args=(transport,), name="sgl_rwttt siblings", daemon=True
                )
                reader.start()
            self._joined.append(_Request(seat.number, payload, items.put))
        return _answer(items, transport, payload)

    def _await_only(self, seats: set[Any]) -> None:
        if not self._awaited <= seats:
            self._awaited &= seats
            self._changed.notify_all()

    def _fits(self, payload: Json) -> bool:
        """One dict of session parameters serves a batch: same owner, parent and offset."""
        first = self._joined[0].payload if self._joined else payload
        return bool(payload["session_params"] == first["session_params"])

    def _run(self, transport: Transport) -> None:
        with self._changed:
            while self._awaited and self._changed.wait(WAIT_S):
                pass
            self._is_open = False
        requests = sorted(self._joined, key=lambda request: request.number)
        end: Any = StateError("the answer's stream ended before the answer did")
        has_begun = False
        try:
            if len(requests) == 1:
                end = _ALONE
                return
            for item in transport.generate_siblings(batch_of([r.payload for r in requests])):
                has_begun = True
                requests[item["index"]].put(item)
        except BaseException as error:
            # SGLang refuses a whole batch for one bad request, before it runs any of them.
            is_refusal = isinstance(error, StateError) and not isinstance(error, ServerGone)
            end = _ALONE if is_refusal and not has_begun else error
        finally:
            for request in requests:
                request.put(end)


class Seat:
    """A branch's place in the batch of its siblings, good for its first request."""

    __slots__ = ("_siblings", "number")

    def __init__(self, siblings: Siblings, number: int) -> None:
        self._siblings = siblings
        self.number = number

    def join(self, transport: Transport, payload: Json) -> Iterator[Json] | None:
        """See `Siblings.join`."""
        return self._siblings.join(self, transport, payload)

    def leave(self) -> None:
        """See `Siblings.leave`."""
        self._siblings.leave(self)


def batch_of(payloads: list[Json]) -> Json:
    """One payload of requests that continue one parent, streamed so that each ends by itself.

    Of a request that did not ask to be streamed, SGLang sends the first token and the whole.
    """
    batch: Json = {
        "input_ids": [p["input_ids"] for p in payloads],
        "rid": [p["rid"] for p in payloads],
        "sampling_params": [
            p["sampling_params"] | ({} if p.get("stream") else {"stream_interval": _NEVER})
            for p in payloads
        ],
        "session_params": payloads[0]["session_params"],
        "stream": True,
    }
    for name, default in REQUEST_FIELDS.items():
        batch[name] = [p.get(name, default) for p in payloads]
    return batch


def _answer(items: SimpleQueue[Any], transport: Transport, payload: Json) -> Iterator[Json]:
    while True:
        item = items.get()
        if item is _ALONE:
            yield from answers(transport, payload)
            return
        if isinstance(item, StateError):  # one of its own: an error collects tracebacks
            raise StateError.from_wire(item.to_wire()) from item
        if isinstance(item, BaseException):
            raise item
        yield checked(item)
        if finish_reason(item):
            return


def answers(transport: Transport, payload: Json) -> Iterator[Json]:
    """One request by itself: the growing answer if it asks to be streamed, else the whole."""
    if payload.get("stream"):
        yield from transport.generate_stream(payload)
    else:
        yield transport.generate(payload)
