"""One rule's WRITEs at several group sizes: `writes_worker.py JOB.json RESULT.json`.

Started by bench_writes.py. Importing this file costs nothing heavy: SGLang's own processes import
it again.
"""

from __future__ import annotations

import json
import random
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

BEFORE, AFTER = 9, 8  # decode steps of a run before the one with the WRITE, and after it
FIRST_ID = 3  # below it are special tokens of small checkpoints


def step_times(transport: Any, prompts: list[list[int]], decode: int) -> list[float]:
    """Seconds of each decode step of prompts that run together, by when its last token came."""
    sampling = {"max_new_tokens": decode, "ignore_eos": True, "temperature": 0}
    payload = {
        "input_ids": prompts,
        "sampling_params": [dict(sampling) for _ in prompts],
        "stream": True,
    }
    arrived: dict[int, float] = {}  # tokens generated -> when the last stream had them
    for item in transport.generate_siblings(payload):
        arrived[item["meta_info"]["completion_tokens"]] = time.perf_counter()
    times = [arrived[count] for count in range(1, decode + 1)]
    return [after - before for before, after in pairwise(times)]


def prompts_of(owners: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Random prompts that share nothing."""
    rng = random.Random(seed)
    return [
        [FIRST_ID + index, *(rng.randrange(FIRST_ID, vocabulary) for _ in range(length - 1))]
        for index in range(owners)
    ]


def writes(transport: Any, groups: list[int], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Per group size: seconds of the step with a WRITE for everybody, and of one without.

    All owners complete their first chunk in the same decode step.
    """
    info = transport.info()
    length, found = info["chunk"] - BEFORE, {}
    if length < 1:
        raise ValueError(f"chunks of {info['chunk']} tokens leave no prompt")
    for group in groups:
        runs = []
        for repeat in range(repeats + 1):
            prompts = prompts_of(group, length, info["vocab_size"], 1000 * group + repeat)
            steps = step_times(transport, prompts, BEFORE + AFTER)
            # The token that completes the chunk is the BEFOREth generated one: it is consumed in
            # the step that ends with the next one's arrival.
            plain = sorted(steps[1 : BEFORE - 1] + steps[BEFORE:])
            runs.append({"write": steps[BEFORE - 1], "plain": plain[len(plain) // 2]})
        found[str(group)] = runs[1:]  # the first one warms up
    return found


def main() -> None:
    """Run the job and write its result."""
    from sgl_rwttt.lang.engine import EngineTransport

    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    transport = EngineTransport(job["model"], skip_tokenizer_init=True, **job["options"])
    before = transport.info()["counters"]
    groups, after = writes(transport, job["groups"], job["repeats"]), transport.info()
    result = {
        "groups": groups,
        "pools": after["pools"],
        **{name: after["counters"][name] - before[name] for name in ("commits", "updates")},
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    transport.close()


if __name__ == "__main__":
    main()
