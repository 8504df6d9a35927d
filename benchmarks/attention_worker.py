"""One engine whose decode steps are timed at several sizes: `attention_worker.py JOB RESULT`.

Started by bench_attention.py. Importing this file costs nothing heavy: SGLang's own processes
import it again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine_worker import WARMUP_TOKENS, Bench, Job, decode_window


@dataclass(frozen=True)
class AttentionJob:
    """What one engine is asked to do; plain values, it travels as JSON."""

    model: str  # checkpoint folder without TTT
    options: dict[str, Any]  # keyword arguments of sglang.Engine
    batches: dict[str, list[list[int]]]  # name of a size -> prompts that are answered together
    decode: int  # tokens to generate per stream, at least 2
    repeats: int


def work(job: AttentionJob) -> dict[str, list[dict[str, Any]]]:
    """Per size and repeat: seconds of prefill and of one decode step, and the tokens."""
    bench = Bench(Job(job.model, job.options, {}, False, [], job.decode, job.repeats, []))
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in job.batches}
    try:
        for prompts in job.batches.values():
            bench.run(prompts, min(job.decode, WARMUP_TOKENS))
        for _ in range(job.repeats):
            for name, prompts in job.batches.items():
                bench.flush()
                start, streams = bench.run(prompts, job.decode)
                window = decode_window(streams)
                runs[name].append(
                    {
                        "step": window.seconds * len(prompts) / window.tokens,
                        "prefill": max(stream.arrivals[0][0] for stream in streams) - start,
                        "outputs": [stream.output for stream in streams],
                    }
                )
    finally:
        bench.engine.shutdown()
    return runs


def main() -> None:
    """Read the job, write the result; a failure leaves no result and a traceback in the log."""
    from sgl_rwttt.srt_ext.launch import prepare_environment

    prepare_environment()
    job = AttentionJob(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(work(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
