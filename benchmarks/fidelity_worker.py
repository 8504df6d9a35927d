"""Owners alone and in a batch, on one engine: `fidelity_worker.py JOB.json RESULT.json`.

Started by check_fidelity.py. Importing this file costs nothing heavy: SGLang's own processes import
it again.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_worker import Bench, Job
from fidelity_hooks import ENV_ORDERS, write_orders
from weights import change

HOOKS = Path(__file__).resolve().with_name("fidelity_hooks.py")
PLUGIN = "[sglang.srt.plugins]\nfidelity_hooks = fidelity_hooks:register\n"


@dataclass(frozen=True)
class FidelityJob:
    """What one engine is asked to do; plain values, it travels as JSON."""

    model: str  # checkpoint folder
    options: dict[str, Any]  # keyword arguments of sglang.Engine
    state: dict[str, Any]  # `ttt_*` options
    tokens: list[list[int]]  # the whole context of each owner
    prompts: list[int]  # tokens of each that are not scored
    read: list[int]  # scored tokens that are read in the prefill; the others are decoded
    compared: int  # so many owners also run alone; the others are company
    top: int  # most probable tokens to report
    rules: list[str | None]  # one batch for each: the rule that is broken in it

    def saved(self) -> int:
        """Snapshots that the engine is asked for: one of each owner in each run."""
        return self.compared + len(self.rules) * len(self.tokens)


class Fidelity(Bench):
    """An engine that is made to say given tokens."""

    def __init__(self, job: FidelityJob, folder: Path) -> None:
        self.orders = folder / "orders.json"
        self.snapshots = folder / "snapshots"
        self.snapshots.mkdir()
        write_orders(self.orders, None, {})
        announce(folder / "plugin", self.orders)
        folders = {"ttt_snapshot_dir": str(self.snapshots), "ttt_max_snapshots": job.saved()}
        state = {**job.state, **folders}
        super().__init__(Job(job.model, job.options, state, True, [], 0, 1, []))
        self.asked = job

    def together(self, owners: Sequence[int], rule: str | None) -> list[dict[str, Any]]:
        """Run these owners in one batch from empty caches; what was computed for each."""
        self.flush()
        rids = {owner: uuid.uuid4().hex for owner in owners}
        write_orders(self.orders, rule, {rids[n]: self.asked.tokens[n] for n in owners})

        async def all_of_them() -> list[dict[str, Any]]:
            return await asyncio.gather(*(self.owner(n, rids[n]) for n in owners))

        return self.engine.loop.run_until_complete(all_of_them())

    async def owner(self, number: int, rid: str) -> dict[str, Any]:
        """One owner's whole context: scores of its tokens, and the changes of its weights."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        job, manager = self.asked, self.engine.tokenizer_manager
        tokens, prompt, read = job.tokens[number], job.prompts[number], job.read[number]
        given = prompt + read
        session = (await self.verb("open", {}))["owner"]
        request = GenerateReqInput(
            input_ids=tokens[:given],
            rid=rid,
            sampling_params={
                "temperature": 0.0,
                "ignore_eos": True,
                "max_new_tokens": len(tokens) - given,
            },
            session_params={"id": session},
            return_logprob=True,
            logprob_start_len=prompt - 1,
            top_logprobs_num=job.top,
        )
        try:
            answer = await anext(aiter(manager.generate_request(request, None)))
            if list(answer["output_ids"]) != tokens[given:]:
                raise RuntimeError(f"the tokens were not forced: {answer['output_ids'][:8]} ...")
            found = scores(answer["meta_info"], tokens[prompt:], manager.model_config.vocab_size)
            await self.verb("save", {"owner": session, "name": rid, "rid": rid})
            return {**found, "state": self.snapshots / rid}
        finally:
            await self.verb("close", {"owner": session})


def announce(folder: Path, orders: Path) -> None:
    """Make the hooks an installed plugin for SGLang's processes, in a folder on their path."""
    metadata = folder / "fidelity_hooks-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fidelity_hooks\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(PLUGIN)
    shutil.copy(HOOKS, folder)
    sys.path.insert(0, str(folder))  # which spawned processes inherit
    os.environ[ENV_ORDERS] = str(orders)


def scores(meta: dict[str, Any], tokens: Sequence[int], vocabulary: int) -> dict[str, Any]:
    """Log-probability of each scored token, and the most probable ones with theirs.

    Among tokens of the prompt SGLang scores the last one of the vocabulary as itself, but names it
    0 (`logprob_result_processor.py`). Raises RuntimeError when the engine scored other tokens.
    """
    read = len(meta["input_token_logprobs"]) - 1
    names = [0 if n < read and t == vocabulary - 1 else t for n, t in enumerate(tokens)]
    rows = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
    tops = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"]]
    if [row[1] for row in rows] != names or len(tops) != len(rows):
        raise RuntimeError(f"{len(rows)} scores and {len(tops)} tops of {len(tokens)} tokens")
    return {
        "logprobs": [row[0] for row in rows],
        "top": [[[entry[1], entry[0]] for entry in top] for top in tops],
    }


def drift(alone: Path, batched: Path) -> float:
    """|change in the batch - change alone| / |change alone|, the largest of all layers."""
    pairs = zip(change(alone), change(batched), strict=True)
    return max(float((there - here).norm() / here.norm()) for here, there in pairs)


def work(job: FidelityJob, folder: Path) -> dict[str, Any]:
    """The compared owners one after the other, then all owners together, once for each rule."""
    bench = Fidelity(job, folder)
    try:
        alone = [bench.together([n], None)[0] for n in range(job.compared)]
        batches = []
        for rule in job.rules:
            found = bench.together(range(len(job.tokens)), rule)[: job.compared]
            for mine, reference in zip(found, alone, strict=True):
                mine["drift"] = drift(reference["state"], mine.pop("state"))
            batches.append({"rule": rule, "owners": found})
        for each in alone:
            del each["state"]
        return {"alone": alone, "batches": batches}
    finally:
        bench.engine.shutdown()


def main() -> None:
    """Read the job, write the result; a failure leaves no result and a traceback in the log."""
    from sgl_rwttt.srt_ext.launch import prepare_environment

    prepare_environment()
    job = FidelityJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        result = work(job, Path(folder))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
