"""A server in this process that speaks the wire with a toy model.

It keeps its own token lists and recomputes every state id from scratch, so that the client's
incremental ledger is checked against something that shares only the hash with it.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from typing import Any

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import (
    ForeignOwner,
    IncompatibleSnapshot,
    InvalidStateRequest,
    OwnerReleased,
    ServerGone,
    StaleVersion,
    StateError,
    UnknownOwner,
    UnknownState,
    UnsupportedByRule,
)
from sgl_rwttt.core.lineage import LineageClock, cleared_root_id, root_id

from .toy_tokenizer import toy_tokenizer

Json = dict[str, Any]
CHUNK = 8
_KEYS = {"ttt_mode", "ttt_root", "ttt_expect", "ttt_pin", "ttt_clear"}


@dataclass
class Node:
    """One request: the tokens of its context, with their modes."""

    rid: str
    parent: str | None
    root: str
    tokens: list[int]
    modes: list[Effect]
    next_root: str | None = None


@dataclass
class Context:
    """A snapshot with the context: the root with its version number, the tokens, client data."""

    root: str
    number: int
    tokens: list[int]
    modes: list[Effect]
    client: Json


@dataclass
class Session:
    owner: str
    nodes: dict[str, Node] = field(default_factory=dict)
    roots: dict[str, int] = field(default_factory=dict)  # hex -> version number
    pins: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)  # every rid ever
    timeout: float | None = None  # as asked at open; nothing here times out


class FakeServer:
    """The sessions, and a model whose next token is a hash of the state and the last tokens."""

    def __init__(self, chunk: int = CHUNK, adds_bos: bool = False) -> None:
        self.chunk = chunk
        self.tokenizer = toy_tokenizer(adds_bos)
        self.root = root_id("toy", "in_place").hex()
        self.sessions: dict[str, Session] = {}
        self.closed: set[str] = set()
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # something was closed or aborted
        self.unwanted: set[str] = set()  # rids that were aborted
        self.asked = 0  # requests that have come
        self.is_deaf = False  # in a step so long that it hears of nothing
        self.files: dict[str, tuple[str, int]] = {}  # snapshots: (root, version number)
        self.contexts: dict[str, Context] = {}  # what is in them besides
        self.lost: list[StateError] = []  # raised by the next saves of a context
        self.boot()
        self.scripts: list[list[int]] = []  # outputs of the next gens, in order
        self.failures: list[StateError] = []  # raised by the next requests, in order
        self.batch_failures: list[StateError] = []  # raised by the next batches of siblings
        self.breaks: list[tuple[int, StateError]] = []  # (items before it, raised by that batch)
        self.log: list[tuple[str, Json]] = []
        self.delay = 0.0
        self.is_dead = False

    def boot(self) -> None:
        """(Re)start: every state is lost."""
        self.boot_id = secrets.token_hex(4)
        self.sessions.clear()
        self.closed.clear()

    def say(self, *texts: str | list[int]) -> None:
        """Script what the next gens sample (token ids, or texts tokenised alone)."""
        for text in texts:
            ids = self.tokenizer.encode(text) if isinstance(text, str) else list(text)
            self.scripts.append(ids)

    @property
    def live_nodes(self) -> int:
        return sum(len(session.nodes) for session in self.sessions.values())

    # The wire

    def control(self, op: str, args: Json) -> Json:
        with self.lock:
            self.check_alive()
            self.log.append((op, args))
            return dict(getattr(self, "op_" + op)(**args))

    def check_alive(self) -> None:
        if self.is_dead:
            raise ServerGone("the fake server is dead")

    def op_info(self) -> Json:
        return {"model_path": "toy", "boot_id": self.boot_id, "rule": "in_place"}

    def op_open(self, timeout: float | None = None, rank: int | None = None) -> Json:
        session = Session(secrets.token_hex(8), timeout=timeout)
        self.sessions[session.owner] = session
        session.roots[self.root] = 0
        return {
            "owner": session.owner,
            "root": self.root,
            "version": 0,
            "chunk": self.chunk,
            **self.op_info(),
        }

    def op_close(self, owner: str) -> Json:
        self.session(owner)
        del self.sessions[owner]
        self.closed.add(owner)
        self.changed.notify_all()
        return {"owner": owner}

    def op_renew(self, owners: list[str]) -> Json:
        unknown = [owner for owner in owners if owner not in self.sessions]
        return {"boot_id": self.boot_id, "unknown": unknown}

    def op_abort(self, owner: str, rids: list[str]) -> Json:
        self.session(owner)
        self.unwanted.update(rids)
        self.changed.notify_all()
        return {"owner": owner}

    def op_drop(self, owner: str, rid: str) -> Json:
        session = self.session(owner)
        self.node(session, rid)
        doomed = [rid]
        for name in doomed:
            doomed += [n.rid for n in session.nodes.values() if n.parent == name]
        for name in doomed:
            del session.nodes[name]
        return {"dropped": doomed}

    def op_unpin(self, owner: str, name: str) -> Json:
        session = self.session(owner)
        if name not in session.pins:
            raise UnknownState(f"no pin {name}")
        session.pins.remove(name)
        return {}

    def op_release_root(self, owner: str, root: str) -> Json:
        if self.session(owner).roots.pop(root, None) is None:
            raise UnknownState(f"no root {root}")
        return {}

    def op_save(
        self,
        owner: str,
        name: str,
        replace: bool,
        root: str | None = None,
        rid: str | None = None,
        offset: int = 0,
        kv: bool = False,
        client: Json | None = None,
    ) -> Json:
        session = self.session(owner)
        if name in self.files and not replace:
            raise InvalidStateRequest(f"snapshot {name!r} exists")
        if rid is None:
            if root not in session.roots:
                raise UnknownState(f"no root {root}")
            rows = 0
            saved = (root, session.roots[root])
        else:
            node = self.node(session, rid)
            clock = self.clock(
                node.root, session.roots[node.root], node.tokens[:offset], node.modes[:offset]
            )
            rows = clock.rows
            saved = (cleared_root_id(clock.version_id).hex(), clock.number)
        answer = {"name": name, "root": saved[0], "version": saved[1], "tail_dropped": rows}
        self.contexts.pop(name, None)
        if kv:
            if self.lost:
                raise self.lost.pop(0)
            tokens, modes = node.tokens[:offset], node.modes[:offset]
            number = session.roots[node.root]
            self.contexts[name] = Context(node.root, number, tokens, modes, client or {})
            answer |= {"position": offset, "tail": rows, "state_id": clock.state_id.hex()}
        self.files[name] = saved
        return answer

    def op_restore(self, owner: str, name: str, rid: str, pin: str, kv: bool | None = None) -> Json:
        if name not in self.files:
            raise UnknownState(f"there is no snapshot {name!r}")
        session, context = self.session(owner), self.contexts.get(name)
        if kv and context is None:
            raise IncompatibleSnapshot("context: the file holds the weights only")
        if context is None or kv is False:
            root, number = self.files[name]
            session.roots[root] = number
            return {"name": name, "root": root, "version": number}
        session.roots[context.root] = context.number
        session.nodes[rid] = Node(rid, None, context.root, context.tokens[:], context.modes[:])
        session.used.add(rid)
        session.pins.add(pin)
        clock = self.clock(context.root, context.number, context.tokens, context.modes)
        return {
            "name": name,
            "root": context.root,
            "root_version": context.number,
            "version": clock.number,
            "tail": clock.rows,
            "position": clock.position,
            "state_id": clock.state_id.hex(),
            "mode": context.modes[-1].value,
            "tokens": context.tokens,
            "modes": [[i, i + 1, mode.value] for i, mode in enumerate(context.modes)],
            "client": context.client,
            "kv_loaded": len(context.tokens),
        }

    def op_owner(self, owner: str, memory: bool = False) -> Json:
        session = self.session(owner)
        cleared = {node.rid: node.next_root for node in session.nodes.values()}
        branches = [
            {
                "rid": node.rid,
                "parent": node.parent if node.parent in session.nodes else None,
                "running": False,
                "mode": node.modes[-1].value,
                "pin": None,
                "root": node.root,
                "next_root": cleared[node.rid],
                "position": len(node.tokens),
                "version": 0,
                "tail": 0,
                "state_id": "0" * 32,
            }
            for node in session.nodes.values()
        ]
        return {
            "name": "public",
            "nodes": len(branches),
            "pin_count": len(session.pins),
            "root_count": len(session.roots) - 1,
            "referenced_bytes": 0,
            "branches": branches,
            "truncated": False,
            **({"memory": {"context_tokens": len(branches)}} if memory else {}),
        }

    def session(self, owner: str) -> Session:
        if owner in self.closed:
            raise OwnerReleased(f"session {owner} was closed", owner=owner)
        if owner not in self.sessions:
            raise UnknownOwner(f"session {owner} does not exist", owner=owner)
        return self.sessions[owner]

    def node(self, session: Session, rid: str) -> Node:
        if rid in session.nodes:
            return session.nodes[rid]
        if any(rid in other.nodes for other in self.sessions.values()):
            raise ForeignOwner(f"branch {rid} belongs to another owner")
        raise UnknownState(f"branch {rid} does not exist")

    def clock(self, root: str, number: int, tokens: list[int], modes: list[Effect]) -> LineageClock:
        clock = LineageClock(bytes.fromhex(root), self.chunk, number)
        for mode, run in groupby(zip(tokens, modes, strict=True), key=itemgetter(1)):
            clock.push([token for token, _ in run], mode)
        return clock

    # Generating

    def admit(self, payload: Json) -> tuple[Session, Node, int, Json]:
        """(session, node with the prompt only, version number of its root, ttt keys)."""
        custom = payload["sampling_params"]["custom_params"]
        unknown = {k for k in custom if k not in _KEYS or not isinstance(custom[k], str)}
        if unknown:
            raise InvalidStateRequest(f"unknown keys {unknown}")
        given = payload["session_params"]
        session = self.session(given["id"])
        if payload["rid"] in session.used:
            raise InvalidStateRequest("a reused rid")
        if custom.get("ttt_clear") == "commit":
            raise UnsupportedByRule("complete chunks only", owner=session.owner)
        mode = Effect(custom["ttt_mode"])
        if given.get("rid") is None:
            root, tokens, modes = custom.get("ttt_root", self.root), [], []
            if root not in session.roots:
                raise UnknownState(f"no root {root}")
        else:
            parent = self.node(session, given["rid"])
            offset = given["offset"]
            if not 1 <= offset <= len(parent.tokens):
                raise InvalidStateRequest(f"offset {offset} outside 1..{len(parent.tokens)}")
            root, tokens, modes = parent.root, parent.tokens[:offset], parent.modes[:offset]
        number = session.roots[root]
        at = self.clock(root, number, tokens, modes).state_id.hex()
        if custom.get("ttt_expect", at) != at:
            raise StaleVersion(f"expected {custom['ttt_expect']}, at {at}")
        ids = payload["input_ids"]
        if not tokens and not ids:
            raise InvalidStateRequest("the request has no tokens")
        node = Node(payload["rid"], given.get("rid"), root, tokens + ids, modes + [mode] * len(ids))
        session.used.add(node.rid)
        return session, node, number, custom

    def generate(self, payload: Json) -> Iterator[Json]:
        """The growing answer; the last item is complete."""
        rid, owner = payload["rid"], payload.get("session_params", {}).get("id")
        with self.changed:
            self.asked += 1
            if self.delay:
                self.changed.wait_for(
                    lambda: not self.is_deaf and (rid in self.unwanted or owner in self.closed),
                    self.delay,
                )
            self.check_alive()
            if rid in self.unwanted:
                raise OwnerReleased("the request was ended: its client gave it up", branch=rid)
            self.log.append(("generate", payload))
            if self.failures:
                raise self.failures.pop(0)
            session, node, number, custom = self.admit(payload)
            params, mode = payload["sampling_params"], Effect(custom["ttt_mode"])
            script = self.scripts.pop(0) if self.scripts and params["max_new_tokens"] else None
        prompt, output, reason = len(node.tokens), [], None
        logprobs: list[list[Any]] = []
        while params["max_new_tokens"] and reason is None:
            token, logprob = self.next_token(node, number, params, script, len(output))
            output.append(token)
            logprobs.append([logprob, token, None])
            node.tokens.append(token)
            node.modes.append(mode)
            reason = self.finish(params, output)
            if reason is None:
                yield {
                    "output_ids": list(output),
                    "meta_info": {"finish_reason": None, "completion_tokens": len(output)},
                }
        with self.lock:
            self.check_alive()
            session.nodes[node.rid] = node
            yield self.report(
                payload, session, node, number, prompt, output, reason, custom, logprobs
            )

    def siblings(self, payload: Json) -> Iterator[Json]:
        """A streamed batch: one item of each request in turn; a refusal is an item."""
        with self.lock:
            self.check_alive()
            self.log.append(("batch", payload))
            if self.batch_failures:
                raise self.batch_failures.pop(0)
            left, error = self.breaks.pop(0) if self.breaks else (-1, None)
        running = dict(enumerate(self.watched(single) for single in singles(payload)))
        while running:
            for index, items in list(running.items()):
                item = next(items)
                if left == 0 and error is not None:
                    raise error
                left -= 1
                yield {**item, "index": index}
                if item["meta_info"]["finish_reason"]:
                    del running[index]

    def watched(self, payload: Json) -> Iterator[Json]:
        """What a client sees of one request of a batch, with its stream_interval."""
        interval = payload["sampling_params"].get("stream_interval", 1)
        try:
            for count, item in enumerate(self.generate(payload)):
                if item["meta_info"]["finish_reason"] or count % interval == 0:
                    yield item
        except StateError as error:
            reason = {"type": "abort", "message": error.to_header()}
            yield {"output_ids": [], "meta_info": {"finish_reason": reason}}

    def report(
        self,
        payload: Json,
        session: Session,
        node: Node,
        number: int,
        prompt: int,
        output: list[int],
        reason: Json | None,
        custom: Json,
        logprobs: list[list[Any]],
    ) -> Json:
        consumed = prompt + max(len(output) - 1, 0)
        clock = self.clock(node.root, number, node.tokens[:consumed], node.modes[:consumed])
        state = {
            "owner": session.owner,
            "branch": node.rid,
            "root": node.root,
            "version": clock.number,
            "tail": clock.rows,
            "position": consumed,
            "mode": custom["ttt_mode"],
            "state_id": clock.state_id.hex(),
            "versions": [],
            "updates": clock.number - number,
        }
        if "ttt_pin" in custom:
            session.pins.add(custom["ttt_pin"])
        if "ttt_clear" in custom:
            root = cleared_root_id(clock.version_id).hex()
            session.roots[root] = clock.number
            state["next_root"] = node.next_root = root
        meta: Json = {
            "finish_reason": reason or {"type": "length", "length": 0},
            "completion_tokens": len(output),
            "prompt_tokens": prompt,
            "cached_tokens": 0,
            "state": state,
        }
        if payload.get("return_logprob"):
            meta["output_token_logprobs"] = logprobs
            start = payload.get("logprob_start_len")
            if start is not None:
                meta["input_token_logprobs"] = [
                    [None if i == start else self.logprob(node, number, i), node.tokens[i], None]
                    for i in range(start, prompt)
                ]
        return {"output_ids": output, "meta_info": meta}

    def logprob(self, node: Node, number: int, i: int) -> float:
        clock = self.clock(node.root, number, node.tokens[:i], node.modes[:i])
        return -_fraction(clock.version_id, node.tokens[max(i - 3, 0) : i + 1]) * 5 - 0.01

    def next_token(
        self, node: Node, number: int, params: Json, script: list[int] | None, index: int
    ) -> tuple[int, float]:
        if script is not None:
            token = script[index] if index < len(script) else self.tokenizer.eos_token_id
            return token, -1.0
        clock = self.clock(node.root, number, node.tokens, node.modes)
        seed = clock.version_id
        if params.get("temperature", 1.0) > 0:
            seed += node.rid.encode()
        draw = _fraction(seed, node.tokens[-3:])
        token = 4 + int(draw * (len(self.tokenizer) - 4))
        return token, math.log(max(draw, 1e-3))

    def finish(self, params: Json, output: list[int]) -> Json | None:
        tail = self.tokenizer.decode(output, skip_special_tokens=False)
        for stop in params.get("stop") or ():
            if stop in tail:
                return {"type": "stop", "matched": stop}
        ends = {self.tokenizer.eos_token_id, *(params.get("stop_token_ids") or ())}
        if output[-1] in ends and not params.get("ignore_eos"):
            return {"type": "stop", "matched": output[-1]}
        if len(output) >= params["max_new_tokens"]:
            return {"type": "length", "length": len(output)}
        return None


def singles(payload: Json) -> list[Json]:
    """The requests of a batch, each with its own of every list."""
    count = len(payload["input_ids"])
    assert all(len(v) == count for v in payload.values() if isinstance(v, list))
    return [
        {name: v[i] if isinstance(v, list) else v for name, v in payload.items()}
        for i in range(count)
    ]


def _fraction(seed: bytes, tokens: list[int]) -> float:
    digest = blake2b(seed + repr(tokens).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


class FakeTransport:
    """The transport to a `FakeServer`."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server

    @property
    def tokenizer(self) -> Any:
        return self.server.tokenizer

    def generate(self, payload: Json) -> Json:
        *_, last = self.server.generate(payload)
        return last

    def generate_batch(self, payload: Json) -> list[Json]:
        return [
            self.generate({**payload, "input_ids": ids, "rid": rid})
            for ids, rid in zip(payload["input_ids"], payload["rid"], strict=True)
        ]

    def generate_stream(self, payload: Json) -> Iterator[Json]:
        yield from self.server.generate(payload)

    def generate_siblings(self, payload: Json) -> Iterator[Json]:
        yield from self.server.siblings(payload)

    def control(self, op: str, args: Json) -> Json:
        return self.server.control(op, args)

    def info(self) -> Json:
        return self.server.control("info", {})

    def close(self) -> None:
        pass


__all__ = ["CHUNK", "FakeServer", "FakeTransport"]
