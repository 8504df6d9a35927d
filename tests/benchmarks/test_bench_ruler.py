"""The RULER benchmark without the harness: refusals, what arrived, pairs, the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.benchmarks.scripts import load, table_rows
from tests.golden import FOLDER as GOLDEN

SMALL = GOLDEN / "llama_embed_proj"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load("bench_ruler")


@pytest.fixture(scope="module")
def worker() -> ModuleType:
    return load("ruler_worker")


@pytest.fixture(scope="module")
def prompts() -> ModuleType:
    return load("ruler_prompts")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (["--tasks", "fwe", "--lengths", "4096"], "fwe at 4096: 4096 + 256 tokens are more than"),
        (["--tasks", "fwe", "--lengths", "1024", "--context", "1100"], "the 1100 of --context"),
        (["--tasks", "vt", "fwe", "--lengths", "512"], "vt at 512: too short, use vt at 1024"),
        (["--tasks", "qa_squad", "--lengths", "1024"], "qa_squad needs dev-v2.0.json"),
        (["--harness-python", "/nowhere/python"], "make bench-env"),
        (["--samples", "1"], "--samples must be 2 to 500"),
    ],
)
def test_refusals(
    given: list[str], reason: str, bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: a length that the model cannot hold, found out after hours or not at all; a search
    for a prompt that never ends; a task whose files are downloaded."""
    always = ["--model", str(SMALL), "--harness-python", sys.executable]
    with pytest.raises(SystemExit) as stopped:
        bench.parse([*always, *given])
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err


def test_files_of_the_other_tasks(prompts: ModuleType, tmp_path: Path) -> None:
    """Guards: a download; a task that runs although a file of it is missing, or the reverse."""
    import datasets
    import requests

    tasks = load("ruler_tasks")
    assert len(tasks.TASKS) == 13
    assert len(tasks.missing_files(None)) == len(tasks.missing_files(tmp_path)) == 7
    (tmp_path / "dev-v2.0.json").write_text('{"data": [1]}')
    (tmp_path / "PaulGrahamEssays.json").write_text('{"text": "One. Two."}')
    lacking = tasks.missing_files(tmp_path)
    assert "qa_squad" not in lacking
    assert lacking["niah_single_2"] == ["nltk_data/tokenizers/punkt_tab"]
    real = requests.get, datasets.load_dataset
    with prompts.files_only(tmp_path):
        assert requests.get("https://x/dataset/dev-v2.0.json", timeout=1).json() == {"data": [1]}
        essays = datasets.load_dataset("baber/paul_graham_essays", split="train")
        assert essays["text"] == ["One. Two."]
        with pytest.raises(tasks.Refused, match=r"hotpot\.json"):
            requests.get("https://x/hotpot.json")
        with pytest.raises(tasks.Refused, match="another/set"):
            datasets.load_dataset("another/set")
    with prompts.files_only(None), pytest.raises(tasks.Refused):
        datasets.load_dataset("baber/paul_graham_essays", split="train")
    assert (requests.get, datasets.load_dataset) == real


def test_prompts_are_whole(prompts: ModuleType) -> None:
    """Guards: a prompt that the client cuts on its left (the needle with it), one token early."""
    refused = load("ruler_tasks").Refused
    limit, generate = 300, 50  # the client keeps 300 - 1 - 50 tokens
    prompts.check_prompts("fwe", [[1] * 249, [1] * 9], generate, limit, 2)
    with pytest.raises(refused, match="fwe: a prompt of 250 tokens"):
        prompts.check_prompts("fwe", [[1] * 9, [1] * 250], generate, limit, 2)
    with pytest.raises(refused, match="made 1 prompts, not 2"):
        prompts.check_prompts("fwe", [[1]], generate, limit, 2)


def test_what_arrived(worker: ModuleType) -> None:
    """Guards: a prompt that was cut on its way, and a state that was not written."""
    record = {
        "sent_tokens": 70,
        "prompt_tokens": 70,
        "completion_tokens": 4,
        "cached_tokens": 0,
        "finish": "length",
    }
    worker.check_arrivals("vt", [[1] * 70], [record])
    for name in ("sent_tokens", "prompt_tokens"):
        with pytest.raises(RuntimeError, match="vt, sample 0: 70 tokens"):
            worker.check_arrivals("vt", [[1] * 70], [record | {name: 69}])
    reused = record | {"cached_tokens": 33}
    counts = {"commits": 2 + 1, "retracted": 0}
    worker.check_writes("vt", [record, reused], counts, 32)
    worker.check_writes("vt", [record, reused], {"commits": 4, "retracted": 1}, 32)
    for wrong in ({"commits": 2, "retracted": 1}, {"commits": 4, "retracted": 0}):
        with pytest.raises(RuntimeError, match=f"counts {wrong['commits']} WRITEs, 3 were due"):
            worker.check_writes("vt", [record, reused], wrong, 32)


@pytest.mark.parametrize("cached", [0, 1, 4, 7])
def test_writes_that_are_due(cached: int) -> None:
    """Guards: the last token counted as read, a block counted twice behind a cached prefix."""
    due = load("ruler_tasks").expected_writes
    for prompt in range(cached + 1, 14):
        for generated in range(1, 9):
            read = range(cached, prompt + generated - 1)
            assert due(prompt, generated, cached, 4) == sum((at + 1) % 4 == 0 for at in read)


class FakeClient:
    """What the harness's client does that ours relies on."""

    def __init__(self, **given: Any) -> None:
        self.given = given

    def _create_payload(self, messages: Any, *, eos: str | None, **_: Any) -> dict[str, Any]:
        return {"prompt": messages, "stop": [] if eos is None else [eos]}

    def parse_generations(self, outputs: Any, **_: Any) -> list[str]:
        return [choice["text"] for choice in outputs["choices"]]


def job(worker: ModuleType, **changed: Any) -> Any:
    asked: dict[str, Any] = {
        "url": "http://127.0.0.1:1",
        "tokenizer": "folder",
        "tasks": ["vt"],
        "lengths": [1024],
        "samples": 2,
        "ways": ["serial", "batch"],
        "concurrency": 8,
        "seed": 0,
        "data": None,
        "timeout_s": 1.0,
        "runs": None,
    }
    return worker.Job(**asked | changed)


def test_same_requests_in_every_way(worker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a stop string in one way only; requests that share an owner; a record that is
    another prompt's; a default max_length."""
    module = SimpleNamespace(LocalCompletionsAPI=FakeClient)
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lm_eval.models", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lm_eval.models.openai_completions", module)
    prompts = worker.Prompts("vt", 1024, None, [[1, 2], [3]], 30)
    payloads = {}
    for way, eos in (("serial", "<end>"), ("batch", None), ("base", None)):
        model = worker.client(job(worker), way, prompts)
        assert model.given["max_length"] == 1024 + 256
        assert model.given["num_concurrent"] == (1 if way == "serial" else 8)
        sent = [model._create_payload([ids], eos=eos) for ids in prompts.ids]
        rids = [payload.pop("rid") for payload in sent]
        assert len(set(rids)) == 2
        for rid, count in reversed(list(zip(rids, (2, 1), strict=True))):
            details = {"cached_tokens": 1} if count == 2 else None
            usage = {"prompt_tokens": count, "completion_tokens": 5}
            answer = {
                "id": rid,
                "usage": usage | {"prompt_tokens_details": details},
                "choices": [{"text": "a", "finish_reason": "stop"}],
            }
            assert model.parse_generations(answer) == ["a"]
        assert [model.records[tuple(ids)]["cached_tokens"] for ids in prompts.ids] == [1, 0]
        payloads[way] = sent
    assert payloads["serial"] == payloads["batch"]
    assert payloads["batch"] == [{"prompt": [1, 2], "stop": []}, {"prompt": [3], "stop": []}]
    assert payloads["base"][0]["custom_params"] == {"ttt_mode": "off"}


def test_harness_results(worker: ModuleType) -> None:
    """Guards: the score of another length: the harness writes -1 for 4,096 whenever it is not."""
    given = {
        "doc_id": 3,
        "doc": {"outputs": ["42"], "input": "..."},
        "resps": [[" 42."]],
        "prompt_hash": "p",
        "4096": -1.0,
        "1024": 1.0,
    }
    assert worker.kept(given, 1024) == {
        "doc": 3,
        "prompt_hash": "p",
        "target": ["42"],
        "text": " 42.",
        "score": 1.0,
    }


def test_finished_tasks_are_kept(worker: ModuleType, prompts: ModuleType, tmp_path: Path) -> None:
    """Guards: three hours lost to an interruption; a table of runs that were asked differently."""
    asked = job(worker, runs=str(tmp_path / "runs.jsonl"), lengths=[1024, 2048])
    assert prompts.finished(asked) == {}
    first, second = ({"task": "vt", "length": n, "ways": {}} for n in (1024, 2048))
    prompts.keep(asked, first)
    prompts.keep(asked, second)
    assert prompts.finished(asked) == {("vt", 1024): first, ("vt", 2048): second}
    assert prompts.prepare(asked, without=prompts.finished(asked)) == []
    prompts.keep(job(worker), first)  # no file, nothing to keep
    other = job(worker, runs=asked.runs, samples=3)
    with pytest.raises(load("ruler_tasks").Refused, match=r"runs.jsonl has runs of .*'samples': 2"):
        prompts.finished(other)


def test_estimate(worker: ModuleType) -> None:
    """Guards: an estimate that leaves out a way, or lets a batch read for free."""
    prompts = [worker.Prompts("vt", 1024, None, [[1] * 600, [1] * 400], 30)]
    minutes = worker.estimated_minutes(job(worker), prompts, 0.06, 0.8)
    assert minutes == pytest.approx((2 * 1000 * 0.06 + 2 * 30 * 0.8 * (1 + 1 / 2)) / 60)


def way(scores: list[float], texts: str, commits: int, reused: int = 0) -> dict[str, Any]:
    samples = [
        {"prompt_hash": str(i), "prompt_tokens": 900 + i, "score": score, "text": text}
        for i, (score, text) in enumerate(zip(scores, texts, strict=True))
    ]
    return {"state": {"commits": commits, "hit_tokens": reused}, "samples": samples}


def made_up(base: bool = False) -> dict[str, Any]:
    first = {"serial": way([1, 0, 0, 1], "abcd", 1200), "batch": way([1, 1, 0, 1], "aXcd", 9, 64)}
    second = {"serial": way([0.5] * 4, "abcd", 100), "batch": way([0.5] * 4, "abcd", 100)}
    if base:
        first["base"] = second["base"] = way([0.0] * 4, "wxyz", 0)
    return {
        "machine": load("common").machine(1),
        "command": "none",
        "quick": False,
        "model": "m",
        "context": 1280,
        "samples": 4,
        "concurrency": 8,
        "harness": "0",
        "kept": 0,
        "info": {"chunk": 32},
        "missing": {"qa_squad": ["dev-v2.0.json"]},
        "runs": [
            {"task": "vt", "length": 1024, "ways": first},
            {"task": "cwe", "length": 1024, "ways": second},
        ],
    }


def test_report(bench: ModuleType) -> None:
    """Guards: an unpaired standard error, a difference of the wrong sign, a mean of all samples
    where it is of tasks, a missing task that is not named."""
    report = json.loads(json.dumps(made_up()))
    text = bench.render(report)
    vt, cwe, mean = table_rows(text)
    assert vt[:6] == ["1024", "vt", "900..903", "4", "50.0 +- 28.9", "75.0 +- 25.0"]
    assert vt[6:] == ["+25.0 +- 25.0", "1", "1,200", "9 (64 tokens reused)"]
    assert cwe[4:8] == ["50.0 +- 0.0", "50.0 +- 0.0", "+0.0 +- 0.0", "0"]
    assert mean[1:4] == ["mean", "", "8"]
    assert mean[6:] == ["+12.5 +- 12.5", "1", "1,300", "109 (64 tokens reused)"]
    assert "- qa_squad: dev-v2.0.json" in text and "earlier" not in text
    assert "1 of 2 tasks are of earlier" in bench.render(report | {"kept": 1})
    assert len(table_rows(bench.render(made_up(base=True)))) == 6


def test_other_prompts_are_no_pair() -> None:
    """Guards: differences between answers to different prompts."""
    report = made_up()
    report["runs"][0]["ways"]["batch"]["samples"].reverse()
    with pytest.raises(ValueError, match="same prompts"):
        load("ruler_report").render(report)


def test_plot(bench: ModuleType, tmp_path: Path) -> None:
    """Guards: a plot that cannot be drawn from the report alone."""
    (path,) = bench.plot(made_up(), tmp_path)
    assert path == tmp_path / "ruler-1024.png"
    assert path.stat().st_size > 1000
