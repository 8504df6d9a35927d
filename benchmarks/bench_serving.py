"""Decode throughput of a TTT checkpoint: serial, batched, and against stock SGLang without TTT.

(a) serial: the streams one after another through one engine with TTT;
(b) ours:   the same streams together through the same engine;
(c) stock:  the same streams together through SGLang without this package, on the base checkpoint.

Every stream has its own prompt and generates greedily, end-of-sequence ignored, so all three
generate the same number of tokens. Same dtype, attention backend, threads and KV pool in all three.
The tokens are streamed, and their times of arrival give the decode window: from the moment all
streams have their first token to the last token; only tokens inside the window count. Prefill is
reported apart. In (a) each stream has its own window, and windows and tokens are summed. Each
engine runs in its own process, one after the other; a warm-up run comes first and the caches are
flushed before every measured run. There is no (c) of a TTT-Linear checkpoint, which SGLang itself
cannot serve.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import (
    Spread,
    add_sizes,
    command_line,
    machine,
    machine_line,
    markdown_table,
    parse_sizes,
    run,
    run_worker,
)
from engine_worker import Job

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.srt_ext.attention import CPU_ATTENTION
from sgl_rwttt.srt_ext.launch import engine_defaults, has_cuda, local_config
from sgl_rwttt.srt_ext.streaming_checkpoint import is_streaming

WORKER = Path(__file__).resolve().with_name("engine_worker.py")
TEXTS = ("glossary.txt", "prose.txt", "code.txt", "frequency.txt")
FULL = {"streams": 8, "prompt": 512, "decode": 128, "repeats": 3}
QUICK = {"streams": 2, "prompt": 16, "decode": 8, "repeats": 1}
SEED = 0
TIMEOUT_S = 4 * 3600.0
FIRST_RANDOM_ID = 3  # below it are the special tokens of small test checkpoints
KV_SLACK = 256  # tokens beyond what the streams need

EPILOG = "The model PATH must be a local folder. With --quick the numbers mean nothing."


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with every default filled in; SystemExit for wrong usage."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], epilog=EPILOG)
    sizes = {
        "streams": "streams, and the size of the batch in (b) and (c)",
        "prompt": "tokens of each prompt",
        "decode": "tokens generated per stream, at least 2",
        "repeats": "measured runs of each kind",
    }
    add_sizes(parser, sizes, FULL, QUICK)
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"))
    parser.add_argument("--model", default="embedded", help="`embedded` or a checkpoint folder")
    parser.add_argument(
        "--rule",
        choices=("checkpoint", "lora_delta"),
        default="checkpoint",
        help="of (a) and (b): the checkpoint's own, or LoRA deltas on the one without TTT",
    )
    parser.add_argument("--base", type=Path, help="folder of the same checkpoint without TTT")
    parser.add_argument(
        "--attention-backend", help="of all engines; default: what this machine's stock engine gets"
    )
    parser.add_argument(
        "--stock-overlap",
        choices=("on", "off"),
        default="on" if has_cuda() else "off",
        help="overlap scheduling of (c); ours has it off. Default: off on the CPU, on with a GPU",
    )
    options = parse_sizes(parser, arguments, FULL, QUICK)
    options.dtype = options.dtype or (["float32"] if options.quick else ["float32", "bfloat16"])
    if min(options.streams, options.prompt, options.repeats, options.threads) < 1:
        parser.error("--streams, --prompt, --repeats and --threads must be at least 1")
    if options.decode < 2:
        parser.error("--decode must be at least 2: the first token belongs to the prefill")
    return options


def make_prompts(model: Path, streams: int, length: int) -> list[list[int]]:
    """One prompt of `length` tokens per stream, all with different first tokens.

    Windows of the package's texts, each from another place; random token ids for a checkpoint
    without tokenizer. Different first tokens leave the prefix cache nothing to share.
    """
    tokens = text_tokens(model) or random_tokens(model, streams + length)
    stride = max(1, len(tokens) // streams)
    prompts: list[list[int]] = []
    used: set[int] = set()
    for index in range(streams):
        starts = ((index * stride + i) % len(tokens) for i in range(len(tokens)))
        start = next((at for at in starts if tokens[at] not in used), None)
        if start is None:
            raise ValueError(f"no {streams} different first tokens in {len(set(tokens))} token ids")
        used.add(tokens[start])
        prompts.append([tokens[(start + i) % len(tokens)] for i in range(length)])
    return prompts


def text_tokens(model: Path) -> list[int]:
    """Token ids of the package's texts; empty when the checkpoint has no tokenizer.json."""
    if not (model / "tokenizer.json").is_file():
        return []
    from importlib.resources import files

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    data = files("sgl_rwttt") / "data"
    texts = ((data / name).read_text(encoding="utf-8") for name in TEXTS)
    return [t for text in texts for t in tokenizer.encode(text, add_special_tokens=False).ids]


def random_tokens(model: Path, count: int) -> list[int]:
    """Fixed pseudo-random token ids of the checkpoint's vocabulary."""
    vocabulary = int(local_config(model)["vocab_size"])
    generator = random.Random(SEED)
    return [generator.randrange(FIRST_RANDOM_ID, vocabulary) for _ in range(count)]


def base_checkpoint(model: Path, folder: Path) -> Path:
    """A view of a TTT checkpoint without TTT, made in `folder`.

    Links to the same files, and a config without the `ttt_*` keys; SGLang's model classes skip
    weights that they do not have.
    """
    config = {k: v for k, v in local_config(model).items() if not k.startswith("ttt_")}
    for file in model.resolve().iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def job_for(
    options: argparse.Namespace, model: Path, dtype: str, stock: bool, prompts: list[list[int]]
) -> Job:
    """The work of one engine: ours runs serially and as a batch, stock as a batch."""
    room = options.streams * (options.prompt + options.decode) + KV_SLACK
    engine = engine_defaults(
        model,
        dtype=dtype,
        attention_backend=options.attention_backend,
        skip_tokenizer_init=True,
        max_total_tokens=max(4096, room),
        max_running_requests=options.streams,
        log_level="error",
    )
    if stock:
        engine["disable_overlap_schedule"] = options.stock_overlap == "off"
    return Job(
        model=str(engine.pop("model_path")),
        options=engine,
        state={} if stock else state_options(options),
        ttt=not stock,
        prompts=prompts,
        decode=options.decode,
        repeats=options.repeats,
        modes=["batch"] if stock else ["serial", "batch"],
    )


def state_options(options: argparse.Namespace) -> dict[str, Any]:
    """The ``ttt_*`` options of our engine."""
    state: dict[str, Any] = {"ttt_memory_mb": 64} if options.quick else {}
    return state | ({} if options.rule == "checkpoint" else {"ttt_backend": options.rule})


def environment(options: argparse.Namespace, stock: bool) -> dict[str, str]:
    """Threads; for the stock engine also a plugin list that this package is not on.

    With ``--attention-backend rwttt_cpu`` the stock engine needs the plugin for that one name.
    """
    variables = {"OMP_NUM_THREADS": str(options.threads)}
    is_without = stock and options.attention_backend != CPU_ATTENTION
    return variables | ({"SGLANG_PLUGINS": "none"} if is_without else {})


def measure_dtype(
    options: argparse.Namespace, model: Path, base: Path | None, dtype: str
) -> dict[str, Any]:
    """Both engines at one dtype, one after the other; ours alone without a base."""
    prompts = make_prompts(model, options.streams, options.prompt)
    results: dict[str, Any] = {"dtype": dtype}
    for name, folder, stock in (("ours", model, False), ("stock", base, True)):
        if folder is None:
            continue
        job = job_for(options, folder, dtype, stock, prompts)
        print(f"running {name}, {dtype} ...", file=sys.stderr, flush=True)
        started = {**asdict(job), "prompts": None, "model": None}
        env = environment(options, stock)
        results[name] = {"job": started, **run_worker(WORKER, asdict(job), env, TIMEOUT_S)}
    return results


def runs_of(result: dict[str, Any], engine: str, mode: str) -> list[dict[str, Any]]:
    """The measured runs of one engine and mode."""
    return [run for run in result[engine]["runs"] if run["mode"] == mode]


def rates(result: dict[str, Any], engine: str, mode: str) -> Spread:
    """Aggregate decode tokens per second."""
    runs = runs_of(result, engine, mode)
    return Spread.of([run["tokens"] / run["seconds"] for run in runs])


def summary(result: dict[str, Any]) -> dict[str, Spread]:
    """Rates a, b, c and the ratios b/a and b/c of one dtype; without stock there is no c."""
    a, b = rates(result, "ours", "serial"), rates(result, "ours", "batch")
    found = {"a": a, "b": b, "b/a": b.over(a)}
    if "stock" in result:
        c = rates(result, "stock", "batch")
        found |= {"c": c, "b/c": b.over(c)}
    return found


def rate_table(results: Sequence[dict[str, Any]], streams: int) -> str:
    """The main table: one row per dtype."""
    header = [
        "dtype",
        "(a) serial, tokens/s",
        f"(b) {streams} in the batch, tokens/s",
        f"(c) stock, {streams} in the batch, tokens/s",
        "b/a",
        "b/c",
    ]
    rows = []
    for result in results:
        s = summary(result)
        forms = {"a": ".1f", "b": ".1f", "c": ".1f", "b/a": ".2f", "b/c": ".2f"}
        cells = [s[name].text(form) if name in s else "-" for name, form in forms.items()]
        rows.append([result["dtype"], *cells])
    return markdown_table(header, rows)


def prefill_table(results: Sequence[dict[str, Any]]) -> str:
    """Seconds until all streams have their first token (serial: summed over the streams)."""
    kinds = (("ours", "serial"), ("ours", "batch"), ("stock", "batch"))
    rows = []
    for result in results:
        cells = [
            Spread.of([run["prefill_seconds"] for run in runs_of(result, *kind)]).text(".2f")
            if kind[0] in result
            else "-"
            for kind in kinds
        ]
        rows.append([result["dtype"], *cells])
    return markdown_table(["dtype", "(a) prefill, s", "(b) prefill, s", "(c) prefill, s"], rows)


def state_table(results: Sequence[dict[str, Any]]) -> str:
    """What the state runtime did in the last run of each mode."""
    modes = ("serial", "batch")
    last = [
        (r["dtype"], mode, runs_of(r, "ours", mode)[-1]["state"]) for r in results for mode in modes
    ]
    names = list(last[0][2])
    rows = [[dtype, mode, *(str(steps[n]) for n in names)] for dtype, mode, steps in last]
    return markdown_table(["dtype", "mode", *(n.replace("_", " ") for n in names)], rows)


def equal_outputs(result: dict[str, Any]) -> int:
    """Streams whose tokens are the same serially and in the batch (last run of each)."""
    serial, batch = (runs_of(result, "ours", mode)[-1]["outputs"] for mode in ("serial", "batch"))
    return sum(one == other for one, other in zip(serial, batch, strict=True))


def render(report: dict[str, Any]) -> str:
    """The whole report as Markdown."""
    results, size = report["results"], report["size"]
    same = "; ".join(f"{r['dtype']} {equal_outputs(r)} of {size['streams']}" for r in results)
    return "\n\n".join(
        [
            f"{machine_line(report['machine'])}\n\n`{report['command']}`",
            f"{size['streams']} streams, {size['prompt']}-token prompts, {size['decode']} tokens "
            f"generated each, median of {size['repeats']} runs (smallest..largest); attention "
            f"backend {report['attention_backend']}, overlap scheduling of stock "
            f"{report['stock_overlap']}.",
            rate_table(results, size["streams"]),
            prefill_table(results),
            state_table(results),
            f"Streams with the same tokens in (a) and (b): {same}.",
        ]
    )


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """All dtypes; the report that `render` prints and `--out` stores."""
    facts = machine(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        if options.model == "embedded":
            model, base = ensure(), options.base or ensure(ttt=False)
        else:
            model, base = Path(options.model), options.base
            if base is None and not is_streaming(local_config(model)):
                base = base_checkpoint(model, Path(folder))
        if options.rule != "checkpoint" and base is not None:
            model = base
        options.attention_backend = (
            options.attention_backend or engine_defaults(base or model)["attention_backend"]
        )
        results = [measure_dtype(options, model, base, dtype) for dtype in options.dtype]
    return {
        "benchmark": "serving",
        "machine": facts,
        "command": command_line(__file__, arguments, options.threads),
        "size": {name: getattr(options, name) for name in FULL},
        "attention_backend": options.attention_backend,
        "stock_overlap": options.stock_overlap,
        "results": results,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and store the raw numbers if asked to."""
    run(arguments, parse, measure, render)


if __name__ == "__main__":
    main()
