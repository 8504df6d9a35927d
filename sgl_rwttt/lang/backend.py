"""The lowering: what a program says becomes requests that continue an exact lineage."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang.lang.ir import SglSamplingParams

from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import InvalidStateRequest, LedgerMismatch, StateError, WriteFailed

from .answer import Answer, Score, finish_reason, grown
from .chat import chat_template
from .history import event_at
from .lease import Lease
from .ledger import Cursor, Node
from .owner import Owner, close_all
from .sampling import CONSUME, lower
from .siblings import answers
from .text import TokenText
from .transport import Json, Transport
from .upstream import BaseBackend


class StateBackend(BaseBackend):
    """Runs programs on one server, over any transport; what `Engine` and `Runtime` are.

    All methods that take a cursor move it only after the server's answer agreed with the ledger.
    """

    def __init__(
        self,
        transport: Transport,
        chat_template_name: str | None = None,
        lease_s: float | None = None,
    ) -> None:
        super().__init__()
        self.transport = transport
        self.lease = Lease(lease_s, transport.control)
        self.model_path = str(transport.info().get("model_path", ""))
        self.text = TokenText(transport.tokenizer)
        self.chat_template = chat_template(chat_template_name, self.model_path, transport.tokenizer)

    def get_model_name(self) -> str:
        """Path of the served model."""
        return self.model_path

    def get_server_info(self) -> Json:
        """Model, pools and counters of the server."""
        return self.transport.info()

    def shutdown(self) -> None:
        """Close every open owner and let go of the server. Idempotent."""
        close_all(self.transport)
        self.lease.close()
        self.transport.close()

    # Nodes

    def commit(
        self,
        owner: Owner,
        cursor: Cursor,
        mode: Effect,
        *,
        pin: str | None = None,
        clear: str | None = None,
    ) -> None:
        """Consume what is pending (and the last sampled token) without generating.

        `pin` retains the point on the server; `clear` ends the context behind it: the cursor then
        stands at the root of an empty one. Nothing moves when it raises.
        """
        ids = self._pending(owner, cursor)
        extra = {k: v for k, v in (("ttt_pin", pin), ("ttt_clear", clear)) if v is not None}
        payload = self._payload(owner, cursor, ids, CONSUME, mode, extra)
        with nullcontext() if clear is None else owner.clearing():
            answer = self._ask(owner, cursor, payload)
            self._advance(owner, cursor, payload, answer, mode, kept=0)
            if clear is not None:
                self._clear(owner, cursor, answer["meta_info"]["state"])

    def generate(
        self,
        owner: Owner,
        cursor: Cursor,
        mode: Effect,
        params: SglSamplingParams,
        logprobs: bool = False,
    ) -> Answer:
        """Consume what is pending and sample an answer in `mode`."""
        payload, stops = self._gen_payload(owner, cursor, mode, params, logprobs)
        answer = self._ask(owner, cursor, payload)
        return self._settle(owner, cursor, payload, answer, mode, stops)

    def generate_stream(
        self,
        owner: Owner,
        cursor: Cursor,
        mode: Effect,
        params: SglSamplingParams,
        logprobs: bool = False,
    ) -> Iterator[Answer]:
        """As `generate`, with the text as it grows; the last item is the settled answer."""
        payload, stops = self._gen_payload(owner, cursor, mode, params, logprobs)
        payload["stream"] = True
        before = [*cursor.ledger.tokens, *payload["input_ids"]]
        item: Json = {}
        for item in self._items(owner, cursor, payload):
            if not finish_reason(item):
                text, mended = self.text.after(before, item["output_ids"])
                yield Answer(self.text.speakable(text, stops), item["meta_info"], mended)
        if not finish_reason(item):
            raise StateError("the answer's stream ended before the answer did", owner=owner.name)
        yield self._settle(owner, cursor, payload, item, mode, stops)

    def select(
        self, owner: Owner, cursor: Cursor, choices: Sequence[str], method: ChoicesSamplingMethod
    ) -> tuple[ChoicesDecision, list[int]]:
        """Score the choices in read mode at a settled point; (decision, ids of the winner)."""
        ids = [self.text.encode(choice, at_root=False) for choice in choices]
        if not ids or not all(ids):
            raise InvalidStateRequest("select needs choices, and none of them may be empty")
        scored = [row[1:] for row in self._input_logprobs(owner, cursor, ids)]
        unconditional = None
        if method.requires_unconditional_logprobs:
            unconditional = self._input_logprobs(owner, Cursor(owner.new_ledger()), ids)
        decision = method(
            choices=list(choices),
            normalized_prompt_logprobs=[
                math.fsum(item[0] for item in row) / len(row) for row in scored
            ],
            input_token_logprobs=scored,
            output_token_logprobs=[[] for _ in scored],
            unconditional_token_logprobs=unconditional,
        )
        return decision, ids[list(choices).index(decision.decision)]

    def score(self, owner: Owner, cursor: Cursor, text: str) -> Score:
        """Log-probabilities of `text` in read mode at a settled point; the state stays.

        In an empty context the first token has none and is left out.
        """
        at_root = not cursor.ledger.tokens
        ids = self.text.encode(text, at_root)
        if len(ids) < 1 + at_root:
            raise InvalidStateRequest(
                "score needs a text with a token to predict", owner=owner.name
            )
        row = self._input_logprobs(owner, cursor, [ids])[0][1:]
        return Score(tuple(ids[at_root:]), tuple(float(item[0]) for item in row))

    # Requests

    def _pending(self, owner: Owner, cursor: Cursor) -> list[int]:
        owner.sweep()
        at_root = not cursor.ledger.tokens and not cursor.pending_ids
        ids = cursor.pending_ids + self.text.encode(cursor.pending_text, at_root)
        if not ids and cursor.node is None:
            raise InvalidStateRequest(
                "the context is empty: say something before the model does", owner=owner.name
            )
        return ids

    def _payload(
        self,
        owner: Owner,
        cursor: Cursor,
        ids: Any,
        sampling: Json,
        mode: Effect,
        extra: Json | None = None,
    ) -> Json:
        clock = cursor.ledger.clock
        custom = {"ttt_mode": mode.value, "ttt_expect": clock.state_id.hex(), **(extra or {})}
        session: Json = {"id": owner.id}
        if cursor.node is None:
            custom["ttt_root"] = clock.root.hex()
        else:
            session.update(rid=cursor.node.rid, offset=len(cursor.ledger))
        return {
            "input_ids": ids,
            "rid": uuid.uuid4().hex,
            "sampling_params": {**sampling, "custom_params": custom},
            "session_params": session,
        }

    def _gen_payload(
        self,
        owner: Owner,
        cursor: Cursor,
        mode: Effect,
        params: SglSamplingParams,
        logprobs: bool,
    ) -> tuple[Json, list[str]]:
        sampling, fields, stops = lower(params)
        ids = self._pending(owner, cursor)
        payload = self._payload(owner, cursor, ids, sampling, mode)
        if logprobs:
            payload["return_logprob"] = True
        return {**payload, **fields}, stops

    def _ask(self, owner: Owner, cursor: Cursor, payload: Json) -> Json:
        *_, answer = self._items(owner, cursor, payload)
        return answer

    def _items(self, owner: Owner, cursor: Cursor, payload: Json) -> Iterator[Json]:
        """The growing answer; a branch's first request goes in the batch of its siblings."""
        item: Json = {}
        try:
            with owner.asking(payload["rid"]):
                items = None
                if cursor.seat is not None:
                    items = cursor.seat.join(self.transport, payload)
                    cursor.seat = None
                for new in items or answers(self.transport, payload):
                    yield (item := grown(item, new))
        except StateError as error:
            owner.explain(error)
            raise

    def _input_logprobs(
        self, owner: Owner, cursor: Cursor, ids: list[list[int]]
    ) -> list[list[list[Any]]]:
        """Per list of ids, SGLang's [logprob, id, text] items; the first is that of the context.

        The requests are scratch children of the cursor's point, in one batch.
        """
        owner.sweep()
        # Where the state is the only memory, frozen tokens see no others; scratch may write.
        mode = Effect.READ if owner.opened.get("stateless", True) else Effect.WRITE
        payload = self._payload(owner, cursor, ids, CONSUME, mode)
        payload["rid"] = [uuid.uuid4().hex for _ in ids]
        payload.update(return_logprob=True, logprob_start_len=max(len(cursor.ledger) - 1, 0))
        try:
            with owner.asking(payload["rid"]):
                answers = self.transport.generate_batch(payload)
        except StateError as error:
            owner.explain(error)
            raise
        finally:
            for rid in payload["rid"]:
                owner.trash.add_node(rid, None)
        return [answer["meta_info"]["input_token_logprobs"] for answer in answers]

    # Answers

    def _settle(
        self,
        owner: Owner,
        cursor: Cursor,
        payload: Json,
        answer: Json,
        mode: Effect,
        stops: list[str],
    ) -> Answer:
        reason = finish_reason(answer)
        if reason.get("matched") == "NaN happened":
            raise WriteFailed("the model's logits were not finite", owner=owner.name)
        before = [*cursor.ledger.tokens[-8:], *payload["input_ids"]]
        settled = self.text.settle(before, answer["output_ids"], reason, stops)
        self._advance(owner, cursor, payload, answer, mode, settled.kept)
        cursor.pending_text = settled.left_over
        answer["meta_info"]["kept_tokens"] = settled.kept
        return Answer(settled.text, answer["meta_info"], settled.mended)

    def _advance(
        self, owner: Owner, cursor: Cursor, payload: Json, answer: Json, mode: Effect, kept: int
    ) -> None:
        """Move the cursor behind the answer's first `kept` output ids, or raise LedgerMismatch."""
        ids, sampling = payload["input_ids"], payload["sampling_params"]
        output = answer["output_ids"] if sampling["max_new_tokens"] else []
        ledger = cursor.ledger
        clock = ledger.clock_after([*ids, *output[:-1]], mode)
        report = answer["meta_info"].get("state") or {}
        ours = (clock.position, clock.state_id.hex())
        theirs = (report.get("position"), report.get("state_id"))
        if ours != theirs:
            raise LedgerMismatch(
                f"the server is at position {theirs[0]} (state {theirs[1]}), "
                f"the ledger at {ours[0]} ({ours[1]})",
                owner=owner.name,
                branch=payload["rid"],
                version=clock.number,
            )
        ledger.push(ids, mode)
        ledger.push(output[:kept], mode)
        what = ", ".join(cursor.notes) or "fill"
        event = event_at(ledger, payload["rid"], mode.value, what)
        cursor.node, cursor.pin, cursor.notes = Node(event, cursor.node, owner.trash), None, []
        cursor.consumed = min(clock.position, len(ledger))
        cursor.pending_ids, cursor.pending_text = [], ""

    def _clear(self, owner: Owner, cursor: Cursor, report: Json) -> None:
        ledger = cursor.ledger.cleared("clear" if cursor.node is None else cursor.node.event.what)
        ledger.root = owner.root(str(report.get("next_root")))
        if report.get("next_root") != ledger.clock.root.hex():
            raise LedgerMismatch(
                f"the server cleared to root {report.get('next_root')}, "
                f"the ledger to {ledger.clock.root.hex()}"
            )
        cursor.ledger, cursor.node, cursor.consumed = ledger, None, 0
