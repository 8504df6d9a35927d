"""A batch over a JSONL file: one program per line, answers in the order of the lines.

    python examples/batch_jsonl.py [--url http://127.0.0.1:30000] [in.jsonl] [out.jsonl]

Every line has a state of its own. A line that fails gives a line with its error, and touches no
other.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sgl_rwttt as rw
from sgl_rwttt import assistant, gen, user

QUESTIONS = Path(__file__).with_name("questions.jsonl")


@rw.function
def ask(s: rw.State, question: str) -> str:
    """One line's program."""
    s += user(question)
    s += assistant(gen("answer", max_tokens=16, temperature=0))
    return str(s["answer"])


def answer_of(row: dict[str, Any], result: rw.State | BaseException) -> dict[str, Any]:
    """The line to write for a line that was read."""
    if isinstance(result, BaseException):
        return {"id": row.get("id"), "error": f"{type(result).__name__}: {result}"}
    return {"id": row["id"], "answer": result.ret_value, "tokens": result.position}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the batch on the embedded model in this process, or on a server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="a running server; default: the embedded model, in process")
    parser.add_argument("source", nargs="?", type=Path, default=QUESTIONS)
    parser.add_argument("target", nargs="?", type=Path, help="default: printed")
    args = parser.parse_args(argv)
    if args.url:
        rw.set_default_backend(rw.Runtime(args.url))
    rows = [json.loads(line) for line in args.source.read_text("utf-8").splitlines() if line]
    arguments = [{k: v for k, v in row.items() if k != "id"} for row in rows]
    results = ask.run_batch(arguments, on_error="return", num_threads=16)
    answers = [answer_of(row, result) for row, result in zip(rows, results, strict=True)]
    lines = "".join(json.dumps(answer) + "\n" for answer in answers)
    if args.target is None:
        print(lines, end="")
    else:
        args.target.write_text(lines, "utf-8")
    failed = sum("error" in answer for answer in answers)
    print(f"{len(answers)} lines, {failed} failed")
    return answers


if __name__ == "__main__":
    main()
