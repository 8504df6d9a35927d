"""A server without a model, for traces: it keeps the books and answers what it is told to."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import UnsupportedByRule
from sgl_rwttt.core.lineage import cleared_root_id, root_id

from .ledger import Ledger
from .transport import Json

_CHUNK = 1  # every token is a version, so no program is told that its text was too short
_RULE = "trace"
_MEMORY = ("pages", "bases", "state_bytes", "own_pages", "own_bases", "own_bytes")
_NOTHING: Json = {  # what an owner holds
    "name": _RULE,
    "branches": [],
    **dict.fromkeys(("nodes", "running", "pin_count", "root_count", "referenced_bytes"), 0),
    "memory": dict.fromkeys((*_MEMORY, "context_tokens", "kv_bytes"), 0),
}


class ByteTokenizer:
    """UTF-8 bytes as token ids."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The bytes of `text`; there are no special tokens."""
        return list(text.encode())

    def decode(self, ids: list[int], **_options: Any) -> str:
        """The text of `ids`; what is no UTF-8 becomes U+FFFD."""
        return bytes(ids).decode("utf-8", "replace")


class TraceTransport:
    """The transport of one trace. Not thread-safe: a traced program runs in one thread.

    Every gen is answered with `answer`; every token has the log-probability -1.
    """

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.answer = ""
        self._default = root_id(_RULE, _RULE).hex()
        self._roots = {self._default: 0}  # hex -> version number
        self._contexts: dict[str, Ledger] = {}  # by request id
        self._files: dict[str, tuple[Ledger, Json | None]] = {}  # (point, client part of a context)

    def generate(self, payload: Json) -> Json:
        """One request: its context grows by the input and by `answer`."""
        sampling = payload["sampling_params"]
        custom, ids = sampling["custom_params"], payload["input_ids"]
        mode = Effect(custom["ttt_mode"])
        context = self._context(custom, payload["session_params"])
        start = payload.get("logprob_start_len", len(context))
        output = self.tokenizer.encode(self.answer) if sampling["max_new_tokens"] else []
        clock = context.clock_after([*ids, *output[:-1]], mode)
        context.push([*ids, *output], mode)
        self._contexts[payload["rid"]] = context
        state: Json = {"position": clock.position, "state_id": clock.state_id.hex()}
        if "ttt_clear" in custom:
            root = cleared_root_id(clock.version_id).hex()
            self._roots[root] = clock.number
            state["next_root"] = root
        prompt = context.tokens[start : len(context) - len(output)]
        meta = {
            "id": payload["rid"],
            "finish_reason": {"type": "length", "length": len(output)},
            "completion_tokens": len(output),
            "state": state,
            "input_token_logprobs": [
                [-1.0 if start + i else None, token, None] for i, token in enumerate(prompt)
            ],
            "output_token_logprobs": [[-1.0, token, None] for token in output],
        }
        return {"output_ids": output, "meta_info": meta}

    def generate_batch(self, payload: Json) -> list[Json]:
        """Children of one point."""
        return [
            self.generate({**payload, "input_ids": ids, "rid": rid})
            for ids, rid in zip(payload["input_ids"], payload["rid"], strict=True)
        ]

    def generate_stream(self, payload: Json) -> Iterator[Json]:
        """The whole answer at once."""
        yield self.generate(payload)

    def generate_siblings(self, payload: Json) -> Iterator[Json]:
        """As `generate_batch`; a traced program has no threads, so nothing asks for this."""
        for index, answer in enumerate(self.generate_batch(payload)):
            yield {**answer, "index": index}

    def control(self, op: str, args: Json) -> Json:
        """Open, save and restore; what only frees something is answered and forgotten."""
        if op == "open":
            names = {"owner": secrets.token_hex(16), "root": self._default, "version": 0}
            return {**names, "chunk": _CHUNK, **self.info()}
        if op == "save":
            return self._save(**args)
        if op == "restore":
            return self._restore(**args)
        if op == "owner":
            return _NOTHING
        if op in ("abort", "close", "drop", "release_root", "renew", "unpin"):
            return {}
        raise UnsupportedByRule(f"{op!r} asks a server, and a trace has none")

    def info(self) -> Json:
        """What a program may ask of any server."""
        return {"model_path": _RULE, "boot_id": _RULE, "rule": _RULE}

    def close(self) -> None:
        """Nothing to let go of."""

    def _context(self, custom: Json, session: Json) -> Ledger:
        """A copy of the context that a request continues."""
        if session.get("rid") is None:
            root = custom.get("ttt_root", self._default)
            return Ledger(bytes.fromhex(root), _CHUNK, self._roots[root])
        parent, kept = self._contexts[session["rid"]], session["offset"]
        root = parent.clock.root
        context = Ledger(root, _CHUNK, self._roots[root.hex()])
        for first, end, mode in parent.spans.runs():
            context.push(parent.tokens[first : min(end, kept)], mode)
        return context

    def _save(
        self, name: str, rid: str | None = None, offset: int = 0, root: str = "", **args: Any
    ) -> Json:
        if rid is None:
            point = Ledger(bytes.fromhex(root), _CHUNK, self._roots[root])
        else:
            point = self._context({}, {"rid": rid, "offset": offset})
        self._files[name] = (point, args.get("client", {}) if args.get("kv") else None)
        return {"name": name, "tail_dropped": 0, "bytes": 0, **point.place}

    def _restore(self, name: str, rid: str, kv: bool | None = None, **_args: Any) -> Json:
        """A snapshot of the trace itself; any other name is a version of its own."""
        point, client = self._files.get(name, (None, None))
        if point is None:
            point = Ledger(root_id(_RULE, name), _CHUNK)
        elif client is None or kv is False:
            point = point.cleared() if point.tokens else point
        root, number = point.clock.root.hex(), point.clock.number
        if client is None or kv is False:
            self._roots[root] = number
            return {"name": name, "root": root, **point.place}
        self._contexts[rid] = point.copy()
        modes = [(first, end, mode.value) for first, end, mode in point.spans.runs()]
        return {
            "name": name,
            "root": root,
            "root_version": self._roots[root],
            "tokens": list(point.tokens),
            "modes": modes,
            "mode": modes[-1][2],
            "client": client,
            **point.place,
        }
