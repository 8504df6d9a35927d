"""The embedded model adapts on documents and on one long stream: `embedded_worker.py JOB RESULT`.

Started by bench_embedded.py; both are JSON files. Importing this file costs nothing heavy: SGLang's
own processes import it again.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from adaptation_worker import generate, loss
from weights import change, norms


@contextmanager
def opened(backend: Any) -> Iterator[str]:
    """An owner for the length of a block."""
    owner = str(backend.transport.control("open", {})["owner"])
    try:
        yield owner
    finally:
        backend.transport.control("close", {"owner": owner})


def write(backend: Any, owner: str, ids: list[int], root: str | None) -> str:
    """Read ids in write mode from the root, drop the context; the root that keeps the weights."""
    custom = {"ttt_mode": "write", "ttt_clear": "drop"} | (
        {} if root is None else {"ttt_root": root}
    )
    return str(generate(backend, owner, ids, custom)["meta_info"]["state"]["next_root"])


def adapted(backend: Any, ids: list[int], other: list[int], first: int) -> dict[str, list[float]]:
    """(before, after) losses when the first `first` tokens of `ids` were read and dropped.

    Of these tokens once more, of those behind them, and of another document.
    """
    texts = {"reread": ids[:first], "continuation": ids[first:], "unrelated": other}
    with opened(backend) as owner:
        before = {name: loss(backend, owner, text, None) for name, text in texts.items()}
        root = write(backend, owner, ids[:first], None)
        return {
            name: [before[name], loss(backend, owner, text, root)] for name, text in texts.items()
        }


def stability(
    backend: Any,
    ids: list[int],
    unrelated: Sequence[list[int]],
    context: int,
    points: Sequence[int],
    norms_before: Sequence[float],
    folder: Path,
) -> list[dict[str, Any]]:
    """One owner reads `ids` in contexts of `context` tokens, each dropped before the next.

    At each of `points` (numbers of contexts read): the change of each layer's weights, and
    [untouched, now] losses of the last context, of the next one and of the unrelated texts.
    """
    pieces = [ids[at : at + context] for at in range(0, len(ids) - context + 1, context)]
    found: list[dict[str, Any]] = []
    with opened(backend) as owner:
        untouched = [loss(backend, owner, text, None) for text in unrelated]
        root: str | None = None
        for index in range(max(points)):
            new = write(backend, owner, pieces[index], root)
            if root is not None:
                backend.transport.control("release_root", {"owner": owner, "root": root})
            root = new
            if index + 1 not in points:
                continue
            texts = {"last": pieces[index], "next": pieces[index + 1]}
            found.append(
                {
                    "tokens": (index + 1) * context,
                    "drift": drifts(backend, owner, root, norms_before, folder),
                    **{
                        name: [loss(backend, owner, text, None), loss(backend, owner, text, root)]
                        for name, text in texts.items()
                    },
                    "unrelated": [
                        [before, loss(backend, owner, text, root)]
                        for before, text in zip(untouched, unrelated, strict=True)
                    ],
                }
            )
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


def drifts(
    backend: Any, owner: str, root: str, norms_before: Sequence[float], folder: Path
) -> list[float]:
    """|W_v - W_0| / |W_0| of each state layer."""
    named = {"owner": owner, "name": "stability", "root": root, "replace": True}
    backend.transport.control("save", named)
    changes = change(folder / "stability")
    return [float(each.norm()) / norm for each, norm in zip(changes, norms_before, strict=True)]


def main() -> None:
    """Run the job and write its result."""
    import sgl_rwttt as rw

    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as name:
        backend = rw.Engine(job["model"], ttt_snapshot_dir=name, **job["options"])
        size = norms(Path(job["model"]), job["layers"])
        result = {
            "table": {
                kind: [adapted(backend, *pair, job["first"]) for pair in pairs]
                for kind, pairs in job["table"].items()
            },
            "stability": {
                kind: stability(
                    backend,
                    each["ids"],
                    each["unrelated"],
                    job["first"],
                    job["points"],
                    size,
                    Path(name),
                )
                for kind, each in job["stability"].items()
            },
        }
        Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
        backend.shutdown()


if __name__ == "__main__":
    main()
