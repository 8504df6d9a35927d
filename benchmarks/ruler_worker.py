"""RULER through lm-evaluation-harness against a server: `ruler_worker.py JOB.json RESULT.json`.

Started by bench_ruler.py with the interpreter of the environment that `make bench-env` makes; needs
the harness and neither torch nor SGLang. Progress goes to stderr.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lang_worker import flush
from ruler_prompts import Job, Prompts, finished, keep, prepare, say
from ruler_tasks import TASKS, Refused, expected_writes

PROBE_TOKENS = 9
COUNTED = ("admissions", "hit_tokens", "commits", "updates", "failed_writes", "retracted")


def check_arrivals(
    name: str, ids: Sequence[Sequence[int]], records: Sequence[dict[str, Any]]
) -> None:
    """Raise RuntimeError unless every prompt was sent and read whole, once; the server counts."""
    for number, (whole, record) in enumerate(zip(ids, records, strict=True)):
        counts = {record["sent_tokens"], record["prompt_tokens"]}
        if counts != {len(whole)}:
            raise RuntimeError(
                f"{name}, sample {number}: {len(whole)} tokens, of which {record['sent_tokens']} "
                f"were sent and {record['prompt_tokens']} arrived"
            )


def check_writes(
    name: str, records: Sequence[dict[str, Any]], counts: dict[str, int], chunk: int
) -> None:
    """Raise RuntimeError unless the server counts the WRITEs of these requests, and no others.

    A request that was retracted for want of memory, and came back, may have written twice.
    """
    due = sum(
        expected_writes(
            record["prompt_tokens"], record["completion_tokens"], record["cached_tokens"], chunk
        )
        for record in records
    )
    writes, twice = counts["commits"], counts["retracted"] > 0
    if writes < due or (writes > due and not twice):
        raise RuntimeError(f"{name}: the server counts {writes} WRITEs, {due} were due")


def client(job: Job, way: str, prompts: Prompts) -> Any:
    """The harness's `local-completions` model, which also notes what it sent and what arrived.

    It sends the same request in every way: the harness's own adds a stop string when
    `num_concurrent` is 1. Every request has an id of its own, which makes it an owner of its own.
    """
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    class Completions(LocalCompletionsAPI):
        def __init__(self) -> None:
            super().__init__(
                model=job.tokenizer,
                base_url=f"{job.url}/v1/completions",
                tokenizer_backend="huggingface",
                num_concurrent=job.concurrent(way),
                max_length=prompts.limit,
                max_retries=1,
                timeout=job.timeout_s,
                seed=job.seed,
            )
            self.sent: dict[str, list[int]] = {}
            self.records: dict[tuple[int, ...], dict[str, Any]] = {}

        def _create_payload(self, messages: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            (ids,) = messages
            payload = super()._create_payload(ids, *args, **{**kwargs, "eos": None})
            payload["rid"] = uuid.uuid4().hex
            self.sent[payload["rid"]] = ids
            if way == "base":
                payload["custom_params"] = {"ttt_mode": "off"}
            return payload

        def model_call(self, *args: Any, **kwargs: Any) -> Any:
            flush(job.url)
            return super().model_call(*args, **kwargs)

        def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
            ids, usage = self.sent.pop(outputs["id"]), outputs["usage"]
            self.records[tuple(ids)] = {
                "sent_tokens": len(ids),
                "prompt_tokens": usage["prompt_tokens"],
                "cached_tokens": (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0),
                "completion_tokens": usage["completion_tokens"],
                "finish": outputs["choices"][0]["finish_reason"],
            }
            return super().parse_generations(outputs, **kwargs)

    return Completions()


def evaluate(job: Job, way: str, prompts: Prompts) -> dict[str, Any]:
    """One task at one length in one way, from empty caches; checked to have arrived whole."""
    from lm_eval.evaluator import evaluate as harness

    flush(job.url)
    model, before, start = client(job, way, prompts), info(job.url), time.perf_counter()
    task = {"tasks": {TASKS[prompts.name].harness: prompts.task}, "groups": {}}
    given = harness(lm=model, task_dict=task, limit=job.samples, bootstrap_iters=0)
    seconds, after = time.perf_counter() - start, info(job.url)
    samples = sorted(given["samples"][TASKS[prompts.name].harness], key=lambda one: one["doc_id"])
    records = [model.records.get(tuple(ids)) for ids in prompts.ids]
    where = f"{prompts.name} at {prompts.length}, {way}"
    if None in records:
        raise RuntimeError(f"{where}: {records.count(None)} prompts were not sent as they are")
    counts = {name: after["counters"][name] - before["counters"][name] for name in COUNTED}
    check_arrivals(where, prompts.ids, records)
    check_writes(where, [] if way == "base" else records, counts, int(after["chunk"]))
    rows = [
        kept(one, prompts.length) | record for one, record in zip(samples, records, strict=True)
    ]
    return {"seconds": seconds, "state": counts, "samples": rows}


def kept(sample: dict[str, Any], length: int) -> dict[str, Any]:
    """What the report keeps of one sample of the harness's results."""
    ((text,),) = sample["resps"]
    return {
        "doc": sample["doc_id"],
        "prompt_hash": sample["prompt_hash"],
        "target": sample["doc"]["outputs"],
        "text": text,
        "score": sample[str(length)],
    }


def info(url: str) -> dict[str, Any]:
    """What /ttt/info answers."""
    import requests

    answer = requests.get(f"{url}/ttt/info", timeout=60)
    answer.raise_for_status()
    return dict(answer.json())


def probe(url: str, ids: list[int]) -> tuple[float, float]:
    """Seconds of one prompt token and of one generated token, from a prompt sent twice."""
    import requests

    flush(url)
    times = []
    for tokens in (1, PROBE_TOKENS):  # the second finds its prompt in the cache
        asked = {"model": "probe", "prompt": ids, "max_tokens": tokens, "temperature": 0.0}
        start = time.perf_counter()
        answer = requests.post(f"{url}/v1/completions", json=asked, timeout=600)
        times.append(time.perf_counter() - start)
        answer.raise_for_status()
    return times[0] / len(ids), times[1] / PROBE_TOKENS


def estimated_minutes(job: Job, prompts: Sequence[Prompts], read: float, decode: float) -> float:
    """Minutes that all of this takes; concurrent requests are taken to generate for free."""
    seconds = 0.0
    for each in prompts:
        for way in job.ways:
            seconds += read * sum(map(len, each.ids))
            together = min(job.concurrent(way), len(each.ids))
            seconds += decode * each.generate * len(each.ids) / together
    return seconds / 60


def work(job: Job) -> dict[str, Any]:
    """Make the prompts of what is not finished, check them, evaluate each task in every way."""
    runs = finished(job)
    before = set(runs)
    prompts = prepare(job, without=runs)
    minutes = 0.0
    if prompts:
        minutes = estimated_minutes(job, prompts, *probe(job.url, prompts[0].ids[0]))
    say(f"{len(prompts) * len(job.ways)} runs of {job.samples}, about {minutes:.0f} minutes")
    start = time.perf_counter()
    for each in prompts:
        ways = {}
        for way in job.ways:
            ways[way] = evaluate(job, way, each)
            passed = (time.perf_counter() - start) / 60
            say(f"{each.name} at {each.length}, {way}: done, {passed:.0f} of {minutes:.0f} minutes")
        run = {"task": each.name, "length": each.length, "generate": each.generate, "ways": ways}
        keep(job, run)
        runs[each.name, each.length] = run
    return {
        "harness": version("lm_eval"),
        "info": info(job.url),
        "kept": sum(one in before for one in job.asked()),
        "runs": [runs[one] for one in job.asked()],
    }


def main() -> None:
    """Read the job, write the result; a refusal is the result's only key."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    try:
        result = work(job)
    except Refused as error:
        result = {"refused": str(error)}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
