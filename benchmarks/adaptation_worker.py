"""One rule on many documents: `adaptation_worker.py JOB.json RESULT.json`.

Started by bench_adaptation.py. Importing this file costs nothing heavy: SGLang's own processes
import it again.
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from pathlib import Path
from typing import Any


def adapted(backend: Any, ids: list[int], first: int) -> dict[str, float]:
    """Losses of the second part before and after the first was written, and what that took.

    The document's ids are sent as they are: text that is cut would be tokenized otherwise.
    """
    owner = backend.transport.control("open", {})["owner"]
    try:
        before = loss(backend, owner, ids[first:], None)
        begun = time.perf_counter()
        written = generate(backend, owner, ids[:first], {"ttt_mode": "write", "ttt_clear": "drop"})
        seconds = time.perf_counter() - begun
        state = written["meta_info"]["state"]
        after = loss(backend, owner, ids[first:], state["next_root"])
        taken = {"updates": state["updates"], "seconds": seconds}
        return {"before": before, "after": after, **taken}
    finally:
        backend.transport.control("close", {"owner": owner})


def loss(backend: Any, owner: str, ids: list[int], root: str | None) -> float:
    """Mean loss of all tokens but the first in an empty context, frozen; nats per token."""
    custom = {"ttt_mode": "read"} | ({} if root is None else {"ttt_root": root})
    answer = generate(backend, owner, ids, custom, return_logprob=True, logprob_start_len=0)
    rows = answer["meta_info"]["input_token_logprobs"][1:]
    return -sum(row[0] for row in rows) / len(rows)


def generate(
    backend: Any, owner: str, ids: list[int], custom: dict[str, Any], **more: Any
) -> dict[str, Any]:
    """One request that generates nothing."""
    return dict(
        backend.transport.generate(
            {
                "input_ids": ids,
                "rid": uuid.uuid4().hex,
                "sampling_params": {"max_new_tokens": 0, "custom_params": custom},
                "session_params": {"id": owner},
                **more,
            }
        )
    )


def main() -> None:
    """Run the job and write its result."""
    import sgl_rwttt as rw

    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    backend = rw.Engine(job["model"], **job["options"])
    result = {
        kind: [adapted(backend, ids, job["first"]) for ids in documents]
        for kind, documents in job["documents"].items()
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    backend.shutdown()


if __name__ == "__main__":
    main()
