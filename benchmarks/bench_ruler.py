"""RULER, one request at a time against the batched path of the same server, task by task.

lm-evaluation-harness generates the prompts, sends them to `sgl-rwttt serve` on this machine and
scores the answers (model type `local-completions`). It lives in an environment of its own, which
`make bench-env` makes. Ways of one task, with the same prompts and empty caches before each:
  serial  one request at a time, and the caches emptied before each of them
  batch   several requests at a time, which share what they have in common
  base    like batch, without state (`--base`): what the fast weights change
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from common import (
    LOG_TAIL,
    WorkerFailed,
    command_line,
    machine,
    parse_sizes,
    run,
    run_worker,
)
from lang_worker import await_health
from ruler_report import plot, render
from ruler_tasks import MARGIN, TASKS, Refused, check_lengths, missing_files

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.srt_ext.launch import fresh_environment, local_config

__all__ = ["main", "plot", "render"]

WORKER = Path(__file__).resolve().with_name("ruler_worker.py")
HARNESS = WORKER.parents[1] / ".venv-bench" / "bin" / "python"
TIMEOUT_S = 24 * 3600.0
REQUEST_S = 4 * 3600.0  # a request waits for those before it
FULL = {"lengths": [2048, 4096], "tasks": None, "samples": 25}
QUICK = {"lengths": [512], "tasks": ["niah_single_1"], "samples": 2}


@contextlib.contextmanager
def serving(model: Path, flags: Sequence[str], threads: int) -> Iterator[str]:
    """`sgl-rwttt serve` on a free port of this machine; its URL.

    Raises WorkerFailed with the end of the server's log when it does not come up or what runs
    meanwhile fails. Its process group is killed at the end.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sgl_rwttt.cli.main", "serve", str(model), *flags]
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**fresh_environment(), "OMP_NUM_THREADS": str(threads)},
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        try:
            await_health(url, process)
            yield url
        except RuntimeError as error:
            log.seek(0)
            raise WorkerFailed(f"{error}\nserver: {log.read()[-LOG_TAIL:]}") from error
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def server_flags(options: argparse.Namespace) -> list[str]:
    """Context for the longest prompt, KV for more than a batch, cached tokens in answers."""
    kv = (options.concurrency + 1) * options.context
    return [
        f"--context-length={options.context}",
        f"--max-total-tokens={kv}",
        "--enable-cache-report",
        "--log-level=info",
    ]


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """All tasks; the report that `render` prints. Raises Refused before anything is generated."""
    facts = machine(options.threads)
    print("ruler: the server starts ...", file=sys.stderr, flush=True)
    with serving(options.model, server_flags(options), options.threads) as url:
        job = {
            "url": url,
            "tokenizer": str(options.model),
            "tasks": options.tasks,
            "lengths": options.lengths,
            "samples": options.samples,
            "ways": ["serial", "batch", *(["base"] if options.base else [])],
            "concurrency": options.concurrency,
            "seed": options.seed,
            "data": options.ruler_data and str(options.ruler_data.resolve()),
            "timeout_s": REQUEST_S,
            "runs": options.runs and str(options.runs.resolve()),
        }
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
        env["TQDM_MININTERVAL"] = "10"  # seconds between updates of the harness's bars
        python = str(options.harness_python)
        result = run_worker(WORKER, job, env, TIMEOUT_S, python=python, live=True)
    if "refused" in result:
        raise Refused(result["refused"])
    return {
        "benchmark": "ruler",
        "machine": facts,
        "command": command_line(__file__, arguments, options.threads),
        "quick": options.quick,
        "model": options.model.name,
        "context": options.context,
        **{name: job[name] for name in ("samples", "concurrency", "seed")},
        "missing": missing_files(options.ruler_data),
        **result,
    }


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags; SystemExit for wrong usage and for tasks that cannot be run as asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", help="tokens; default 2048 4096")
    parser.add_argument(
        "--tasks", nargs="+", choices=list(TASKS), help="default: all whose files are there"
    )
    parser.add_argument("--samples", type=int, help="per task and length, at most 500; default 25")
    parser.add_argument("--concurrency", type=int, default=8, help="of the batch; default 8")
    parser.add_argument("--base", action="store_true", help="also without state")
    parser.add_argument("--ruler-data", type=Path, metavar="DIR", help="files of the other tasks")
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: the embedded one")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of the embedded model"
    )
    parser.add_argument("--context", type=int, help=f"default: the longest length + {MARGIN}")
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="FILE.jsonl",
        help="append each finished task; what is in it already is not run again",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts; default 0")
    parser.add_argument(
        "--harness-python", type=Path, default=HARNESS, help="default: what make bench-env makes"
    )
    options = parse_sizes(parser, arguments, FULL, QUICK)
    if not 2 <= options.samples <= 500 or min(options.concurrency, options.threads) < 1:
        parser.error("--samples must be 2 to 500, --concurrency and --threads at least 1")
    try:
        complete(options)
    except Refused as error:
        parser.error(str(error))
    return options


def complete(options: argparse.Namespace) -> None:
    """Fill in what depends on files and on the model; Refused where that cannot be run."""
    missing = missing_files(options.ruler_data)
    if options.tasks is None:
        options.tasks = [name for name in TASKS if name not in missing]
    lacking = {name: missing[name] for name in options.tasks if name in missing}
    if lacking:
        listed = "; ".join(f"{name} needs {', '.join(files)}" for name, files in lacking.items())
        raise Refused(f"not in --ruler-data: {listed}")
    longest = max(options.lengths) + MARGIN
    given = options.context is not None
    options.context = options.context if given else longest
    check_lengths(options.tasks, options.lengths, options.context, "--context")
    if not options.harness_python.is_file():
        raise Refused(f"no {options.harness_python}: make bench-env, or name --harness-python")
    options.model = options.model or ensure(dtype=options.dtype)
    most = int(local_config(options.model).get("max_position_embeddings", 0))
    check_lengths(options.tasks, options.lengths, most, f"the model {options.model.name}")
    if options.context > most:
        raise Refused(f"--context {options.context} is more than the {most} of the model")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and store the raw numbers if asked to."""
    try:
        return run(arguments, parse, measure, render)
    except Refused as error:
        raise SystemExit(f"refused: {error}") from error


if __name__ == "__main__":
    main()
