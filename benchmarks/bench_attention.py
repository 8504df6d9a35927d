"""CPU attention: SGLang's torch_native against rwttt_cpu, per layer and in a whole decode step.

layer   both backends' decode and prefill of one layer in this process, on the same KV pool, called
        in turns; each is at another layer's tensors than the other, so that they come from memory
        as in a model. Every context is a contiguous prompt, then tokens that alternate with the
        other rows' as decoding leaves them. "siblings" share the prompt. The time of rwttt_cpu
        contains the plan of a step divided by the model's 30 layers.
step    the embedded model without TTT in an engine with each backend, one after the other, streamed
        greedily: seconds of a decode step when all streams decode, and of the prefill.

A ratio is torch_native / rwttt_cpu, above 1 where rwttt_cpu is faster.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attention_worker import AttentionJob
from bench_serving import TIMEOUT_S, make_prompts
from common import (
    Spread,
    command_line,
    machine,
    machine_line,
    markdown_table,
    run_worker,
    write_json,
)

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.srt_ext.launch import engine_defaults, physical_cores, prepare_environment

WORKER = Path(__file__).resolve().with_name("attention_worker.py")
BACKENDS = ("torch_native", "rwttt_cpu")
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 9, 3, 64, 30  # the embedded model's
TURNED_LAYERS = 8  # layers whose tensors take turns
TAIL = 8  # one in so many tokens of a context was decoded in turns with the other rows
STEP_SIZES = ((8, 16), (8, 512), (8, 2048), (1, 512))
QUICK_SIZES = ((2, 16), (1, 24))
MILLISECONDS = 1e3


@dataclass(frozen=True)
class Case:
    """One layer's work, by both backends."""

    name: str
    ms: dict[str, Spread]  # backend -> milliseconds per layer

    @property
    def ratio(self) -> float:
        """How many times as fast rwttt_cpu is."""
        return self.ms[BACKENDS[0]].median / self.ms[BACKENDS[1]].median


class Pool:
    """Both backends over KV of ``rows`` contexts of ``length`` tokens, of random numbers."""

    def __init__(self, rows: int, length: int, shared: int, dtype: Any, layers: int) -> None:
        import torch
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from sgl_rwttt.srt_ext.cpu_attention import CPUAttnBackend

        self.rows, self.length = rows, length
        self.pool = MHATokenToKVPool(
            rows * length + 8, 1, dtype, KV_HEADS, HEAD_DIM, layers, "cpu", False
        )
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.normal_()
        tail = max(1, length // TAIL)
        head = length - tail
        table = torch.arange(rows * head).view(rows, head)
        table[:, :shared] = table[0, :shared].clone()
        turns = torch.arange(rows * tail).view(tail, rows).T + rows * head
        self.table = torch.cat([table, turns], 1).int() + 1
        table_pool = SimpleNamespace(req_to_token=self.table)
        runner = SimpleNamespace(
            device="cpu", token_to_kv_pool=self.pool, req_to_token_pool=table_pool
        )
        self.backends = dict(
            zip(BACKENDS, (TorchNativeAttnBackend(runner), CPUAttnBackend(runner)), strict=True)
        )
        self.layers = [
            RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer)
            for layer in range(layers)
        ]
        self.dtype = dtype

    def batch(self, new: int | None) -> Any:
        """The last token of every row, or a prefill of its last ``new`` tokens."""
        import torch
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        count = new or 1
        lengths = torch.full((self.rows,), self.length)
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE if new is None else ForwardMode.EXTEND,
            req_pool_indices=torch.arange(self.rows),
            seq_lens=lengths,
            seq_lens_cpu=lengths,
            extend_prefix_lens=lengths - count,
            extend_seq_lens=torch.full((self.rows,), count),
            out_cache_loc=self.table[:, self.length - count :].flatten().long(),
            encoder_lens=None,
            spec_info=None,
        )

    def times(self, new: int | None, repeats: int) -> dict[str, Spread]:
        """Milliseconds per layer of each backend; RuntimeError when their outputs differ."""
        import torch

        batch, tokens = self.batch(new), self.rows * (new or 1)
        q = torch.randn(tokens, HEADS * HEAD_DIM).to(self.dtype)
        k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM).to(self.dtype)
        call = "forward_decode" if new is None else "forward_extend"
        outputs, planned = {}, {}
        for name, backend in self.backends.items():
            start = time.perf_counter()
            backend.init_forward_metadata(batch)
            planned[name] = (time.perf_counter() - start) / LAYERS
            outputs[name] = getattr(backend, call)(q, k, v, self.layers[0], batch)
        if not torch.allclose(*outputs.values(), rtol=0.02, atol=0.02):
            raise RuntimeError(f"{call} at {self.rows} x {self.length}: the backends differ")

        def run(name: str, layer: int) -> float:
            start = time.perf_counter()
            getattr(self.backends[name], call)(q, k, v, self.layers[layer], batch)
            return time.perf_counter() - start + planned[name]

        return take_turns(run, len(self.layers), repeats)


def take_turns(run: Callable[[str, int], float], layers: int, repeats: int) -> dict[str, Spread]:
    """Milliseconds per call of both backends, each half the layers away from the other."""
    seconds: dict[str, list[float]] = {name: [] for name in BACKENDS}
    for turn in range(-2, repeats):
        for index, name in enumerate(BACKENDS):
            taken = run(name, (turn + index * layers // 2) % layers)
            if turn >= 0:
                seconds[name].append(taken)
    return {name: Spread.of([MILLISECONDS * s for s in taken]) for name, taken in seconds.items()}


def measure_layers(sizes: Sequence[tuple[int, int]], dtype_name: str, repeats: int) -> list[Case]:
    """All cases of one layer in one dtype."""
    import torch

    dtype = getattr(torch, dtype_name)
    cases = []
    with torch.inference_mode():
        for rows, length in sizes:
            print(f"one layer, {dtype_name}, {rows} x {length} ...", file=sys.stderr, flush=True)
            pool = Pool(rows, length, 0, dtype, TURNED_LAYERS)
            cases.append(Case(f"decode {rows} x {length}", pool.times(None, repeats)))
            if length <= 512:
                few = max(4, repeats // 4)
                cases.append(Case(f"prefill {rows} x {length}", pool.times(length, few)))
                new = length // 4
                name = f"prefill {rows} x {new} after {length - new}"
                cases.append(Case(name, pool.times(new, few)))
            if rows > 1:
                pool = Pool(rows, length, length - length // TAIL, dtype, TURNED_LAYERS)
                name = f"decode {rows} siblings x {length}"
                cases.append(Case(name, pool.times(None, repeats)))
    return cases


def measure_steps(options: argparse.Namespace, model: Path, dtype: str) -> dict[str, Any]:
    """Both engines at one dtype: size -> backend -> runs."""
    sizes = options.sizes
    longest = max(rows * (length + options.decode) for rows, length in sizes)
    batches = {f"{rows} x {length}": make_prompts(model, rows, length) for rows, length in sizes}
    results: dict[str, Any] = {name: {} for name in batches}
    for backend in BACKENDS:
        print(f"whole step, {dtype}, {backend} ...", file=sys.stderr, flush=True)
        engine = engine_defaults(
            model,
            dtype=dtype,
            attention_backend=backend,
            skip_tokenizer_init=True,
            max_total_tokens=longest + 1024,
            max_running_requests=max(rows for rows, _ in sizes),
            disable_overlap_schedule=True,
        )
        engine.pop("model_path")
        job = AttentionJob(str(model), engine, batches, options.decode, options.repeats)
        env = {"OMP_NUM_THREADS": str(options.threads)}
        for name, runs in run_worker(WORKER, asdict(job), env, TIMEOUT_S).items():
            results[name][backend] = runs
    return results


def step_rows(dtype: str, results: dict[str, Any]) -> list[list[str]]:
    """Table rows of the whole step: milliseconds, and ratios of medians."""
    rows = []
    for name, by_backend in results.items():
        cells, ratios = [], []
        for kind in ("step", "prefill"):
            stock, ours = (
                Spread.of([MILLISECONDS * run[kind] for run in by_backend[backend]])
                for backend in BACKENDS
            )
            cells += [stock.text(), ours.text()]
            ratios.append(f"{stock.median / ours.median:.2f}")
        pairs = zip(*(by_backend[backend][0]["outputs"] for backend in BACKENDS), strict=True)
        same = sum(a == b for a, b in pairs)
        rows.append([dtype, name, *cells[:2], ratios[0], *cells[2:], ratios[1], str(same)])
    return rows


def render(report: dict[str, Any]) -> str:
    """The tables of one run."""
    layers = [
        [dtype, case.name, *(case.ms[name].text(".2f") for name in BACKENDS), f"{case.ratio:.2f}"]
        for dtype, cases in report["layers"].items()
        for case in cases
    ]
    steps = [row for dtype, results in report["steps"].items() for row in step_rows(dtype, results)]
    parts = [f"{machine_line(report['machine'])}\n\n`{report['command']}`"]
    if layers:
        header = ["dtype", "one layer", *(f"{name}, ms" for name in BACKENDS), "ratio"]
        parts.append(markdown_table(header, layers))
    if steps:
        kinds = [
            title
            for kind in ("decode step", "prefill")
            for title in (*(f"{kind}, {name}, ms" for name in BACKENDS), "ratio")
        ]
        parts.append(markdown_table(["dtype", "streams", *kinds, "same outputs"], steps))
    return "\n\n".join(parts)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, with every default filled in; SystemExit for wrong usage."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    threads = int(os.environ.get("OMP_NUM_THREADS") or physical_cores())
    parser.add_argument("--threads", type=int, default=threads, help=f"default here: {threads}")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"))
    parser.add_argument("--only", choices=("layer", "step"), help="half of the benchmark")
    parser.add_argument("--repeats", type=int, default=3, help="runs of a whole step (default 3)")
    parser.add_argument("--decode", type=int, default=32, help="tokens per stream (default 32)")
    parser.add_argument("--model", help="a checkpoint folder instead of the embedded model")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write all measurements")
    parser.add_argument("--quick", action="store_true", help="toy sizes, float32: means nothing")
    options = parser.parse_args(arguments)
    options.dtype = options.dtype or (["float32"] if options.quick else ["float32", "bfloat16"])
    options.sizes = QUICK_SIZES if options.quick else STEP_SIZES
    options.turns = 4 if options.quick else 40
    options.repeats = 1 if options.quick else options.repeats
    if options.repeats < 1 or options.threads < 1 or options.decode < 2:
        parser.error("--repeats and --threads must be at least 1, --decode at least 2")
    return options


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, Any]:
    """Everything that was asked for; the report that `render` prints."""
    prepare_environment()
    report: dict[str, Any] = {
        "benchmark": "attention",
        "machine": machine(options.threads),
        "command": command_line(__file__, arguments, options.threads),
        "layers": {},
        "steps": {},
    }
    if options.only != "layer":
        model = Path(options.model) if options.model else ensure(ttt=False)
        for dtype in options.dtype:
            report["steps"][dtype] = measure_steps(options, model, dtype)
    if options.only != "step":
        import torch

        torch.set_num_threads(options.threads)
        for dtype in options.dtype:
            report["layers"][dtype] = measure_layers(options.sizes, dtype, options.turns)
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and store the raw numbers if asked to."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parse(given)
    report = measure(options, given)
    print(render(report))
    layers = {name: [asdict(case) for case in cases] for name, cases in report["layers"].items()}
    write_json(options.out, {**report, "layers": layers})


if __name__ == "__main__":
    main()
