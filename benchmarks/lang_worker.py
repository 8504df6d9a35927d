"""One way to a server, measured in a process of its own: `lang_worker.py JOB.json RESULT.json`.

Started by bench_lang.py. Importing this file costs nothing heavy: SGLang's own processes import it
again.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERBS = ("checkpoint", "fork", "keep", "rollback")
START_S = 300.0
WARMUP = "Warm up."


@dataclass(frozen=True)
class Job:
    """What one server is asked to do; plain values, it travels as JSON."""

    way: str  # "engine" (in process), "http", or "stock": without this package, over HTTP
    model: str  # checkpoint folder
    options: dict[str, Any]  # of the server, as keyword arguments
    parts: list[str]  # "verbs", "siblings"
    context: str  # text that the verbs are called behind
    rounds: int
    prefix: str  # text that the siblings share
    branches: int
    decode: int  # tokens per branch
    repeats: int


@contextmanager
def serving(model: str, options: dict[str, Any], stock: bool) -> Iterator[str]:
    """A server of `model`; its URL. RuntimeError when it does not come up.

    A stock one does without this package's plugin, unless it names its attention backend.
    """
    from sgl_rwttt.srt_ext.attention import CPU_ATTENTION
    from sgl_rwttt.srt_ext.launch import cli_args, fresh_environment

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "sglang.launch_server", *cli_args(model, flags)]
    is_without = stock and options.get("attention_backend") != CPU_ATTENTION
    env = fresh_environment() | ({"SGLANG_PLUGINS": "none"} if is_without else {})
    process = subprocess.Popen([*command, "--port", port], env=env)
    url = f"http://127.0.0.1:{port}"
    try:
        await_health(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def await_health(url: str, process: subprocess.Popen[bytes]) -> None:
    """Return when the server answers."""
    import requests

    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(url + "/health", timeout=5).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(0.3)
    raise RuntimeError(f"the server at {url} did not come up")


def flush(url: str) -> None:
    """Empty the server's caches; it may take a moment to be idle after the last answer."""
    import requests

    for _ in range(50):
        if requests.post(url + "/flush_cache", timeout=60).status_code == 200:
            return
        time.sleep(0.1)
    raise RuntimeError("the caches cannot be flushed: the server does not come to rest")


def verbs(backend: Any, context: str, branches: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each call, behind one word that it has the server read (checkpoint) or nothing.

    `keep` includes freeing the other branches, `rollback` freeing what was abandoned.
    """
    import sgl_rwttt as rw

    taken: dict[str, list[float]] = {name: [] for name in VERBS}

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        taken[name].append(time.perf_counter() - start)

    @rw.function
    def program(s: rw.State) -> None:
        s += context
        start = s.checkpoint("start")
        for _ in range(rounds):
            s += " and"
            with timed("checkpoint"):
                s.checkpoint("here")
            with timed("fork"):
                forked = s.fork(branches)
            forked += rw.gen("a", max_tokens=1, ignore_eos=True)
            for branch in forked:
                branch.sync()
            with timed("keep"):
                s.keep(forked[0])
                forked.release()
            with timed("rollback"):
                s.rollback(start)
                s.stream_executor.owner.sweep()

    program.run(backend=backend)
    return taken


def said(index: int) -> str:
    """What a branch says before its gen."""
    return f" {index}:"


def siblings(backend: Any, prefix: str, branches: int, decode: int) -> dict[str, float]:
    """One prefix, then a gen in each of its branches."""
    import sgl_rwttt as rw

    sampling = {"max_tokens": decode, "ignore_eos": True, "temperature": 0}

    @rw.function
    def program(s: rw.State) -> dict[str, float]:
        begun = time.perf_counter()
        s += prefix
        with s.fork(branches) as forked:
            read = time.perf_counter()
            forked += [said(i) + rw.gen("a", **sampling) for i in range(branches)]
            metas = [branch.get_meta_info("a") for branch in forked]
            return _rates(begun, read, [m["completion_tokens"] for m in metas])

    return dict(program.run(backend=backend).ret_value)


def independent(backend: Any, prefix: str, branches: int, decode: int) -> dict[str, float]:
    """The same contexts as requests that have nothing to do with each other, sent together."""
    sampling = {"max_new_tokens": decode, "ignore_eos": True, "temperature": 0}
    prompts = [backend.text.encode(prefix + said(i), True) for i in range(branches)]
    begun = time.perf_counter()
    payload = {"input_ids": prompts, "sampling_params": [sampling] * branches}
    answers = backend.transport.generate_batch(payload)
    return _rates(begun, None, [a["meta_info"]["completion_tokens"] for a in answers])


def stock_siblings(url: str, prefix: str, branches: int, decode: int) -> dict[str, float]:
    """SGLang's own interpreter and server, the same program."""
    import sglang

    sampling = {"max_tokens": decode, "ignore_eos": True, "temperature": 0}

    @sglang.function
    def program(s: Any) -> None:
        begun = time.perf_counter()
        s += prefix
        s.sync()
        forked = s.fork(branches)
        read = time.perf_counter()
        forked += lambda i: said(i) + sglang.gen("a", **sampling)
        metas = [branch.get_meta_info("a") for branch in forked]
        found.update(_rates(begun, read, [m["completion_tokens"] for m in metas]))

    found: dict[str, float] = {}
    program.run(backend=sglang.RuntimeEndpoint(url))
    return found


def _rates(begun: float, read: float | None, counts: list[int]) -> dict[str, float]:
    """Tokens, and seconds from the beginning and from the moment that the prefix was read."""
    end = time.perf_counter()
    found = {"tokens": float(sum(counts)), "seconds": end - begun}
    return found if read is None else {**found, "branch_seconds": end - read}


def work(job: Job) -> dict[str, Any]:
    """Start the server, warm it up, run every part `repeats` times, stop it."""
    if job.way == "engine":
        return {"verbs": _engine_verbs(job)}
    result: dict[str, Any] = {}
    with serving(job.model, job.options, job.way == "stock") as url:
        size = (job.branches, job.decode)
        kinds: dict[str, Callable[[str], dict[str, float]]] = {
            "stock": lambda prefix: stock_siblings(url, prefix, *size)
        }
        if job.way == "http":
            import sgl_rwttt as rw

            backend = rw.Runtime(url)
            if "verbs" in job.parts:
                result["verbs"] = _verbs(job, backend)
            kinds = {
                "siblings": lambda prefix: siblings(backend, prefix, *size),
                "independent": lambda prefix: independent(backend, prefix, *size),
            }
        if "siblings" in job.parts:
            result["siblings"] = _repeated(job, url, kinds)
    return result


def _repeated(
    job: Job, url: str, kinds: dict[str, Callable[[str], dict[str, float]]]
) -> dict[str, list[dict[str, float]]]:
    """Every kind `repeats` times in turn, from empty caches, behind a short warm-up."""
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for run in kinds.values():
        run(WARMUP)
    for _ in range(job.repeats):
        for kind, run in kinds.items():
            flush(url)
            found[kind].append(run(job.prefix))
    return found


def _verbs(job: Job, backend: Any) -> dict[str, list[float]]:
    verbs(backend, WARMUP, job.branches, 2)
    return verbs(backend, job.context, job.branches, job.rounds)


def _engine_verbs(job: Job) -> dict[str, list[float]]:
    import sgl_rwttt as rw

    backend = rw.Engine(job.model, **job.options)
    try:
        return _verbs(job, backend)
    finally:
        backend.shutdown()


def main() -> None:
    """Read the job, write the result; a failure leaves no result and a traceback in the log."""
    from sgl_rwttt.srt_ext.launch import prepare_environment

    os.environ["PYTHONUNBUFFERED"] = "1"
    prepare_environment()
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(work(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
