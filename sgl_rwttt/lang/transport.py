"""How the backend reaches a server: the only place where HTTP and in-process serving differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from sgl_rwttt.core.errors import ServerGone, StateError

Json = dict[str, Any]


class Transport(Protocol):
    """The wire. Thread-safe; every method raises StateError, ServerGone when the server is lost.

    Payloads are those of SGLang's native `/generate`; control verbs are those of `/ttt/<verb>`.
    """

    @property
    def tokenizer(self) -> Any:
        """The served model's tokenizer (transformers), loaded at first use."""

    def generate(self, payload: Json) -> Json:
        """One request, one answer."""

    def generate_batch(self, payload: Json) -> list[Json]:
        """Requests of one parent in one payload (lists of `input_ids` and `rid`), in order."""

    def generate_stream(self, payload: Json) -> Iterator[Json]:
        """The growing answer; `output_ids` of the last item are complete."""

    def generate_siblings(self, payload: Json) -> Iterator[Json]:
        """Requests of one parent in one streamed payload, each finishing by itself.

        Items are those of `generate_stream` with an `index`; an error of one request is an item
        too (see `checked`). Raises when the payload as a whole is refused.
        """

    def control(self, op: str, args: Json) -> Json:
        """A control verb: open, close, drop, unpin, state."""

    def info(self) -> Json:
        """Model, pools, counters and `boot_id`."""

    def close(self) -> None:
        """Let go of the server (an in-process one stops); idempotent."""


def error_of(message: str, body: Mapping[str, Any] | None = None) -> StateError:
    """The typed error inside SGLang's own error text, else a plain StateError of that text."""
    found = StateError.from_header(message)
    if found is not None:
        return found
    if body is not None and isinstance(body.get("type"), str):
        return StateError.from_wire(body)
    return StateError(message)


def checked(answer: Json) -> Json:
    """The answer (or an item of a stream), unless it says that the request was aborted.

    SGLang raises for some aborts and reports the others, and all those of streams, as an answer.
    """
    error = answer.get("error")
    if error is not None:
        body = error if isinstance(error, dict) else {"message": str(error)}
        raise error_of(str(body.get("message", body)), body)
    reason = answer.get("meta_info", {}).get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise error_of(str(reason.get("message") or "the request was aborted"))
    return answer


def gone(what: str, cause: BaseException | str) -> ServerGone:
    """The error for a lost server."""
    return ServerGone(f"{what} is gone and its states with it: {cause}")
