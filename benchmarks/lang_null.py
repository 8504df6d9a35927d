"""What an interpreter costs per node: ours and SGLang's, on backends that answer at once.

The null server of our interpreter computes its reports once, in a run that is not measured, and
then looks them up, so that the ledger is the client's work alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import sglang
from sglang.lang.backend.base_backend import BaseBackend

import sgl_rwttt as rw
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.lineage import LineageClock, root_id
from sgl_rwttt.lang import StateBackend

Json = dict[str, Any]
CHUNK = 32
WORD, SAID = " word", "a"
BRANCHES = 4
_LENGTH = {"type": "length", "length": 1}


class NullTokenizer:
    """One token per character."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, ids: Sequence[int], **_options: bool) -> str:
        return "".join(map(chr, ids))


class NullTransport:
    """Answers every gen with one token, in write mode; keeps nothing but the points seen."""

    tokenizer = NullTokenizer()

    def __init__(self) -> None:
        clock = LineageClock(root_id("null", "null"), CHUNK)
        self.root = clock.root.hex()
        self._clocks = {clock.state_id.hex(): clock}
        self._reports: dict[tuple[str, tuple[int, ...], int], Json] = {}

    def info(self) -> Json:
        return {"model_path": "null", "boot_id": "null"}

    def control(self, op: str, args: Json) -> Json:
        if op == "open":
            return {"owner": "null", "root": self.root, "version": 0, "chunk": CHUNK, **self.info()}
        return {"unknown": [], **self.info()}

    def generate(self, payload: Json) -> Json:
        sampling, ids = payload["sampling_params"], payload["input_ids"]
        count = min(sampling["max_new_tokens"], 1)
        key = sampling["custom_params"]["ttt_expect"], tuple(ids), count
        report = self._reports.get(key) or self._compute(*key)
        meta = {"finish_reason": _LENGTH, "completion_tokens": count, "state": report}
        if payload.get("return_logprob"):
            meta["output_token_logprobs"] = [[-1.0, ord(SAID), None]] * count
        return {"output_ids": [ord(SAID)] * count, "meta_info": meta}

    def _compute(self, expected: str, ids: tuple[int, ...], count: int) -> Json:
        clock = self._clocks[expected].copy()
        clock.push(ids, Effect.WRITE)
        report = {"position": clock.position, "state_id": clock.state_id.hex()}
        self._reports[expected, ids, count] = report
        clock.push([ord(SAID)] * count, Effect.WRITE)
        self._clocks[clock.state_id.hex()] = clock
        return report

    def generate_siblings(self, payload: Json) -> Iterator[Json]:
        requests = zip(payload["input_ids"], payload["sampling_params"], strict=True)
        for index, (ids, sampling) in enumerate(requests):
            single = {**payload, "input_ids": ids, "sampling_params": sampling}
            yield {**self.generate(single), "index": index}

    def close(self) -> None:
        pass


class NullBackend(BaseBackend):
    """The same for SGLang's interpreter."""

    def generate(self, s: Any, sampling_params: Any) -> tuple[str, Json]:
        return SAID, {"completion_tokens": 1}

    def commit_lazy_operations(self, s: Any) -> None:
        pass


@rw.function
def our_chain(s: rw.State, count: int) -> None:
    for _ in range(count):
        s += WORD + rw.gen("a", max_tokens=1)
    s.sync()


@rw.function
def our_forks(s: rw.State, count: int) -> None:
    for _ in range(count):
        s += WORD
        with s.fork(BRANCHES) as branches:
            branches += rw.gen("a", max_tokens=1)
            branches.join()


@sglang.function
def stock_chain(s: Any, count: int) -> None:
    for _ in range(count):
        s += WORD + sglang.gen("a", max_tokens=1)
    s.sync()


@sglang.function
def stock_forks(s: Any, count: int) -> None:
    for _ in range(count):
        s += WORD
        branches = s.fork(BRANCHES)
        branches += sglang.gen("a", max_tokens=1)
        branches.join()


def overhead(nodes: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds per node (a text, a gen, or a branch's gen), by kind and interpreter."""
    ours, stock = StateBackend(NullTransport()), NullBackend()
    forks = max(1, nodes // (2 * BRANCHES))
    kinds: dict[str, tuple[Any, Any, int, int]] = {
        "text and gen": (our_chain, stock_chain, nodes // 2, 2),
        f"fork({BRANCHES}), a gen in each": (our_forks, stock_forks, forks, 1 + BRANCHES),
    }
    found: dict[str, dict[str, list[float]]] = {}
    for kind, (our_program, stock_program, count, per_turn) in kinds.items():
        run_ours = partial(our_program.run, count=count, backend=ours)
        run_stock = partial(stock_program.run, count=count, backend=stock)
        run_ours()  # the null server's reports
        pairs = [(timed(run_ours), timed(run_stock)) for _ in range(repeats)]
        in_us = 1e6 / (count * per_turn)
        found[kind] = {
            "ours": [mine * in_us for mine, _ in pairs],
            "stock": [theirs * in_us for _, theirs in pairs],
        }
    ours.shutdown()
    return found


def timed(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
