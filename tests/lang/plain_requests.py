"""The oracle's model of a real server: one plain request, or one for each change of mode."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

from sgl_rwttt.lang import StateBackend
from sgl_rwttt.lang.state import State

from .oracle import Answers, Item, Vocabulary, World, point

COMPLETE = {
    "temperature": 0,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "no_stop_trim": True,
}


class PlainAnswers(Answers):
    """Greedy answers of the default root, asked for outside every program."""

    def __init__(self, backend: StateBackend) -> None:
        self.transport = backend.transport
        with self.owner() as opened:
            root, chunk = opened["root"], opened["chunk"]
        super().__init__(Vocabulary(self.transport.tokenizer), [], {}, chunk, 0)
        self.root = bytes.fromhex(root)

    @contextmanager
    def owner(self) -> Iterator[Any]:
        opened = self.transport.control("open", {})
        yield opened
        self.transport.control("close", {"owner": opened["owner"]})

    def ask(self, runs: list[tuple[int, list[int]]], sampling: Any, **fields: Any) -> Any:
        """Read runs of tokens, each in its mode; the last request samples."""
        with self.owner() as opened:
            parent, length = None, 0
            for i, (flag, ids) in enumerate(runs):
                is_last = i == len(runs) - 1
                custom = {"ttt_mode": "write" if flag else "read"}
                where = {"rid": parent, "offset": length} if parent else {}
                parent, length = uuid.uuid4().hex, length + len(ids)
                answer = self.transport.generate(
                    {
                        "input_ids": ids,
                        "rid": parent,
                        "session_params": {"id": opened["owner"], **where},
                        "sampling_params": {
                            **COMPLETE,
                            **(sampling if is_last else {"max_new_tokens": 0}),
                            "custom_params": custom,
                        },
                        **(fields if is_last else {}),
                    }
                )
                report, items = answer["meta_info"]["state"], self.items(runs[: i + 1])
                items += [(t, flag) for t in answer["output_ids"][:-1] if is_last]
                here = point(self.root, 0, self.chunk, items)
                assert report["state_id"] == here.state_id.hex()
                assert (report["version"], report["tail"]) == (here.version, here.tail)
            return answer

    def items(self, runs: Sequence[tuple[int, list[int]]]) -> list[Item]:
        return [(t, flag) for flag, ids in runs for t in ids]

    def runs(self, items: list[Item]) -> list[tuple[int, list[int]]]:
        return [(flag, [t for t, _ in run]) for flag, run in groupby(items, lambda item: item[1])]

    def generate(
        self, root: bytes, number: int, items: list[Item], flag: int, limit: int, stops: list[Any]
    ) -> tuple[list[int], Any, list[float]]:
        runs = self.runs(items)
        if runs[-1][0] != flag:
            runs.append((flag, []))
        strings = [s for s in stops if isinstance(s, str)]
        sampling = {"max_new_tokens": limit, "stop": strings}
        sampling["stop_token_ids"] = [s for s in stops[len(strings) :] if s]  # 0: the model's EOS
        answer = self.ask(runs, sampling, return_logprob=True)
        meta = answer["meta_info"]
        logprobs = [item[0] for item in meta["output_token_logprobs"]]
        return answer["output_ids"], meta["finish_reason"].get("matched"), logprobs

    def logprobs(
        self, root: bytes, number: int, items: list[Item], ids: Sequence[int]
    ) -> list[float]:
        runs = [*self.runs(items), (0, list(ids))]
        answer = self.ask(
            runs, {"max_new_tokens": 0}, return_logprob=True, logprob_start_len=len(items) - 1
        )
        return [item[0] for item in answer["meta_info"]["input_token_logprobs"][1:]]


def held_by_server(backend: StateBackend, s: State) -> tuple[int, int, int]:
    """(requests, pins, roots) that the server holds for the owner."""
    s.sync()
    s.stream_executor.owner.sweep()
    held = backend.transport.control("owner", {"owner": s.owner})
    return held["nodes"], held["pin_count"], held["root_count"]


def held_by_oracle(world: World) -> tuple[int, int, int]:
    nodes, pins, roots = world.alive()
    return len(nodes), pins, len(roots - {world.answers.root.hex()})  # it belongs to nobody
