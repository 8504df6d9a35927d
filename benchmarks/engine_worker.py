"""One SGLang engine in a process of its own, measured: `engine_worker.py JOB.json RESULT.json`.

Started by bench_serving.py; modes_worker.py uses the same engine. Importing this file costs nothing
heavy: SGLang's own processes import it again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WARMUP_TOKENS = 8
FLUSH_ATTEMPTS = 50


@dataclass(frozen=True)
class Job:
    """What one engine is asked to do; plain values, it travels as JSON."""

    model: str  # checkpoint folder
    options: dict[str, Any]  # keyword arguments of sglang.Engine
    state: dict[str, Any]  # `ttt_*` options; read by a TTT checkpoint only
    ttt: bool  # whether to ask for the state runtime's statistics
    prompts: list[list[int]]  # token ids, one list per stream
    decode: int  # tokens to generate per stream, at least 2
    repeats: int
    modes: list[str]  # "serial" and/or "batch", measured in this order in every repeat


@dataclass(frozen=True)
class Stream:
    """One answered stream."""

    arrivals: list[tuple[float, int]]  # (time in s, tokens generated so far), as they came in
    output: list[int]
    state: dict[str, Any] | None  # the state report of a TTT checkpoint


@dataclass(frozen=True)
class Window:
    """The decode window of streams that ran together, or a sum of such windows."""

    tokens: int
    seconds: float

    def __add__(self, other: Window) -> Window:
        return Window(self.tokens + other.tokens, self.seconds + other.seconds)


def decode_window(streams: Sequence[Stream]) -> Window:
    """From the moment all streams have their first token to the last token of any.

    Counts only tokens that came in after that moment, so a stream that starts early adds neither
    its tokens nor its time. Raises ValueError when nothing was generated in the window.
    """
    start = max(stream.arrivals[0][0] for stream in streams)
    end = max(stream.arrivals[-1][0] for stream in streams)
    tokens = 0
    for stream in streams:
        before = max(count for at, count in stream.arrivals if at <= start)
        tokens += stream.arrivals[-1][1] - before
    if tokens < 1 or end <= start:
        raise ValueError("no token was generated after every stream had its first")
    return Window(tokens, end - start)


class Bench:
    """An engine that answers streams and says when each token came in."""

    def __init__(self, job: Job) -> None:
        from sgl_rwttt.srt_ext.options import TTTOptions

        if job.state or job.ttt:
            TTTOptions.from_mapping(job.state).publish()
        import sglang

        self.job = job
        self.engine = sglang.Engine(model_path=job.model, **job.options)

    def run(self, prompts: Sequence[list[int]], decode: int) -> tuple[float, list[Stream]]:
        """Answer `prompts` together; (time of submission, streams)."""

        async def together() -> list[Stream]:
            return await asyncio.gather(*(self.stream(ids, decode) for ids in prompts))

        start = time.perf_counter()
        return start, self.engine.loop.run_until_complete(together())

    async def stream(self, ids: list[int], decode: int, **more: Any) -> Stream:
        """Answer one prompt, greedily, with exactly `decode` tokens; RuntimeError for fewer.

        `more` are further arguments of the engine's `async_generate`.
        """
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": decode}
        chunks = await self.engine.async_generate(
            input_ids=ids, sampling_params=sampling, stream=True, **more
        )
        arrivals: list[tuple[float, int]] = []
        last: dict[str, Any] = {}
        async for chunk in chunks:
            count = int(chunk["meta_info"]["completion_tokens"])
            if count:
                arrivals.append((time.perf_counter(), count))
            last = chunk
        if not arrivals or arrivals[-1][1] != decode:
            raise RuntimeError(f"asked for {decode} tokens, got {arrivals[-1:]}: {last}")
        return Stream(arrivals, list(last["output_ids"]), last["meta_info"].get("state"))

    def flush(self) -> None:
        """Empty the caches; the scheduler may take a moment to be idle after the last answer."""
        for _ in range(FLUSH_ATTEMPTS):
            if self.engine.flush_cache().success:
                return
            time.sleep(0.1)
        raise RuntimeError("the caches cannot be flushed: the engine does not come to rest")

    def info(self) -> dict[str, Any]:
        """What /ttt/info answers; empty for a stock engine."""
        if not self.job.ttt:
            return {}
        return self.engine.loop.run_until_complete(self.verb("info", {}))

    async def verb(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """A control verb of the state runtime."""
        from sgl_rwttt.srt_ext.control import control

        return await control(self.engine.tokenizer_manager, name, arguments)

    def measure(self, mode: str) -> dict[str, Any]:
        """One run of all streams from empty caches; serial or as a batch."""
        self.flush()
        before = self.info()
        prompts, decode = self.job.prompts, self.job.decode
        groups = [prompts] if mode == "batch" else [[ids] for ids in prompts]
        window, prefill, streams = Window(0, 0.0), 0.0, []
        for group in groups:
            start, answered = self.run(group, decode)
            window += decode_window(answered)
            prefill += max(stream.arrivals[0][0] for stream in answered) - start
            streams += answered
        return {
            "mode": mode,
            **asdict(window),
            "prefill_seconds": prefill,
            "outputs": [stream.output for stream in streams],
            "state": state_steps(before, self.info(), streams, list(map(len, prompts))),
        }


def state_steps(
    before: dict[str, Any],
    after: dict[str, Any],
    streams: Sequence[Stream],
    prompts: Sequence[int],
) -> dict[str, int]:
    """What the state runtime did in one run; empty for a stock engine.

    `owner_steps` are (owner, forward) pairs, each one READ and one commit; `writes` are blocks
    completed, each one BoundaryUpdate, `decode_writes` those after the prompts, which have the
    lengths `prompts`.
    """
    if not after:
        return {}
    versions = [int((stream.state or {})["version"]) for stream in streams]
    names = ("commits", "folds", "adoptions", "copies", "drops", "evictions")
    delta = {name: after["store"][name] - before["store"][name] for name in names}
    in_prompt = sum(prompt // int(after["chunk"]) for prompt in prompts)
    return {
        "owner_steps": delta.pop("commits"),
        "writes": sum(versions),
        "decode_writes": sum(versions) - in_prompt,
        **delta,
        "failed_writes": after["counters"]["failed_writes"],
    }


def work(job: Job) -> dict[str, Any]:
    """Start the engine, warm it up, measure every mode `repeats` times, stop it."""
    bench = Bench(job)
    try:
        bench.run(job.prompts, min(job.decode, WARMUP_TOKENS))
        runs = [bench.measure(mode) for _ in range(job.repeats) for mode in job.modes]
        return {"runs": runs, "info": bench.info()}
    finally:
        bench.engine.shutdown()


def main() -> None:
    """Read the job, write the result; a failure leaves no result and a traceback in the log."""
    from sgl_rwttt.srt_ext.launch import prepare_environment

    prepare_environment()
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    Path(sys.argv[2]).write_text(json.dumps(work(job)), encoding="utf-8")


if __name__ == "__main__":
    main()
