"""The prompts of bench_ruler.py, made by lm-evaluation-harness, and what is asked of a server.

Importing this file needs the standard library only; making prompts needs the harness.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import sys
import tempfile
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from ruler_tasks import MARGIN, TASKS, Refused

PROMPTS_S = 1800.0  # for the prompts of one task, whose search for a length may never end


@dataclass(frozen=True)
class Job:
    """What is asked of a server; plain values, it travels as JSON."""

    url: str
    tokenizer: str  # folder
    tasks: list[str]
    lengths: list[int]
    samples: int
    ways: list[str]  # "serial": one at a time, caches emptied; "batch"; "base": without state
    concurrency: int
    seed: int
    data: str | None  # folder of the files that some tasks need
    timeout_s: float  # of one request
    runs: str | None  # file of finished tasks, one line of JSON each

    def key(self) -> dict[str, Any]:
        """What two runs of one task have to agree on to be the same."""
        asked = {name: getattr(self, name) for name in ("samples", "ways", "concurrency", "seed")}
        return {"model": Path(self.tokenizer).name, **asked}

    def asked(self) -> list[tuple[str, int]]:
        """(task, length) of every run, length by length."""
        return [(name, length) for length in self.lengths for name in self.tasks]

    def concurrent(self, way: str) -> int:
        """Requests at a time."""
        return 1 if way == "serial" else self.concurrency


@dataclass(frozen=True)
class Prompts:
    """A task of the harness at one length, with the prompts of its first documents."""

    name: str
    length: int
    task: Any
    ids: list[list[int]]  # of each document, complete
    generate: int  # most tokens of an answer

    @property
    def limit(self) -> int:
        """The client's `max_length`: the most tokens of prompt and answer, and one."""
        return self.length + MARGIN


@contextlib.contextmanager
def files_only(data: Path | None) -> Iterator[None]:
    """Answer the downloads of the harness's tasks from the files in `data`; refuse all others.

    The tasks that need no file import the sentence splitter too, whose tables they never use: an
    empty folder keeps the import from downloading them.
    """

    def get(url: str, **_: Any) -> Any:
        file = None if data is None else data / url.rsplit("/", 1)[-1]
        if file is None or not file.is_file():
            raise Refused(f"the harness asks for {url}, which is not in --ruler-data")
        text = file.read_text(encoding="utf-8")
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: json.loads(text))

    def load_dataset(name: str, **_: Any) -> dict[str, list[str]]:
        if data is None or name != "baber/paul_graham_essays":
            raise Refused(f"the harness asks for the data set {name}, which is not offline")
        essays = json.loads((data / "PaulGrahamEssays.json").read_text(encoding="utf-8"))
        return {"text": [essays["text"]]}

    with tempfile.TemporaryDirectory() as empty:
        tables = Path(empty) if data is None else data / "nltk_data"
        if not (tables / "tokenizers" / "punkt_tab").is_dir():
            tables = Path(empty)
            (tables / "tokenizers" / "punkt_tab").mkdir(parents=True)
        with (
            patch("requests.get", get),
            patch("datasets.load_dataset", load_dataset),
            patch.dict(os.environ, {"NLTK_DATA": str(tables)}),
        ):
            yield


def load(job: Job, name: str, length: int, tokenizer: Any) -> Prompts:
    """One task at one length; the same job makes the same prompts."""
    import lm_eval.tasks.ruler
    import numpy as np
    from lm_eval.tasks import TaskManager

    random.seed(job.seed)
    np.random.seed(job.seed)
    manager = TaskManager(
        include_path=next(iter(lm_eval.tasks.ruler.__path__)),
        include_defaults=False,
        metadata={"tokenizer": job.tokenizer, "max_seq_lengths": [length]},
    )
    harness = TASKS[name].harness
    with contextlib.redirect_stdout(sys.stderr):
        task = manager.load([harness])["tasks"][harness]
    task.build_all_requests(limit=job.samples)
    texts = [instance.args[0] for instance in task.instances]
    ids = tokenizer(texts, add_special_tokens=False).input_ids
    return Prompts(name, length, task, ids, task.config.generation_kwargs["max_gen_toks"])


def finished(job: Job) -> dict[tuple[str, int], dict[str, Any]]:
    """The runs in `job.runs` by task and length. Raises Refused when one is not of this job."""
    file = None if job.runs is None else Path(job.runs)
    if file is None or not file.is_file():
        return {}
    found = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        kept = json.loads(line)
        if kept["job"] != job.key():
            raise Refused(f"{file.name} has runs of {kept['job']}, not of {job.key()}")
        found[kept["run"]["task"], kept["run"]["length"]] = kept["run"]
    return found


def keep(job: Job, run: dict[str, Any]) -> None:
    """Add a finished run to `job.runs`."""
    if job.runs is not None:
        with Path(job.runs).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"job": job.key(), "run": run}) + "\n")


def prepare(job: Job, without: Container[tuple[str, int]] = ()) -> list[Prompts]:
    """All tasks at all lengths, but those `without`.

    Raises Refused when one would be cut, or has too few documents.
    """
    left = [one for one in job.asked() if one not in without]
    if not left:
        return []
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.tokenizer)
    found = []
    with files_only(Path(job.data) if job.data else None):
        for name, length in left:
            say(f"prompts of {name} at {length} tokens ...")
            faulthandler.dump_traceback_later(PROMPTS_S, exit=True)
            prompts = load(job, name, length, tokenizer)
            faulthandler.cancel_dump_traceback_later()
            check_prompts(name, prompts.ids, prompts.generate, prompts.limit, job.samples)
            found.append(prompts)
    return found


def check_prompts(
    name: str, ids: Sequence[Sequence[int]], generate: int, limit: int, samples: int
) -> None:
    """Raise Refused when the client would cut a prompt on its left, or there are too few.

    The harness keeps the last `limit - 1 - generate` tokens of a prompt and says nothing.
    """
    if len(ids) < samples:
        raise Refused(f"{name}: the harness made {len(ids)} prompts, not {samples}")
    longest = max(map(len, ids))
    if longest > limit - 1 - generate:
        raise Refused(
            f"{name}: a prompt of {longest} tokens and an answer of {generate} do not fit "
            f"max_length {limit}, so the harness would cut the prompt"
        )


def say(text: str) -> None:
    """A line of progress."""
    print(f"ruler: {text}", file=sys.stderr, flush=True)
