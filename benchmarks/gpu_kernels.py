"""The state kernels on a GPU: correct on random inputs, and how near to the card's limits.

    python benchmarks/gpu_kernels.py --out kernels.json    # one GPU, a few minutes
    python benchmarks/gpu_kernels.py --tiny                # no GPU: does the script work?

Needs torch and Triton, not SGLang. Every operation is checked against float64 and then timed at the
shapes of Qwen3-4B with six state layers, chunks of 128 tokens and eight owners, in float32 and
bfloat16 pools. Successive calls use the tensors of another layer, together far larger than the L2
cache. Times are those of the device, since the host queues calls ahead of it; the host's own time
per call is another column. Exit status: 1 when a check fails, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
from common import command_line, machine, machine_line, markdown_table, package_version, write_json
from gpu_cases import TINY, Case, Data, Shape, cases
from gpu_timing import NO_GPU, Limits, Timing, measure, measure_limits, seconds

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Result:
    """One operation in one dtype."""

    name: str
    dtype: str
    error: float
    tolerance: float
    this: Timing
    eager: Timing
    private: Timing | None
    moved: int
    operations: int
    copy_share: float  # of the copy bandwidth
    matrix_share: float  # of the matrix rate

    @property
    def good(self) -> bool:
        """Whether the check passed."""
        return self.error <= self.tolerance


def run_case(case: Case, data: Data, limits: Limits, rounds: int) -> Result:
    """Check, then time, one operation."""
    error = case.error()
    this = measure(case.run, rounds, data.device)
    rate = limits.rate(data.dtype)
    return Result(
        case.name,
        str(data.dtype).removeprefix("torch."),
        error,
        case.tolerance,
        this,
        measure(case.eager, rounds, data.device),
        None if case.private is None else measure(case.private, rounds, data.device),
        case.moved,
        case.operations,
        case.moved / seconds(this) / limits.copy,
        case.operations / seconds(this) / rate,
    )


def render(results: Sequence[Result], limits: Limits) -> str:
    """The limits and one table."""
    rates = ", ".join(f"{name} {rate / 1e12:.1f}" for name, rate in limits.matrix.items())
    rows = []
    for r in results:
        bound = "matrix" if r.matrix_share > r.copy_share else "copy"
        share = max(r.matrix_share, r.copy_share)
        private = "" if r.private is None else f"{r.private.us.median / r.this.us.median:.2f}"
        rows.append(
            [
                r.name,
                r.dtype,
                f"{r.error:.1e}" + ("" if r.good else f" > {r.tolerance:.0e} FAILED"),
                r.this.us.text(",.1f"),
                f"{r.this.host_us:,.0f}",
                f"{r.eager.us.median / r.this.us.median:.2f}",
                private,
                f"{100 * share:.0f} % of {bound}",
            ]
        )
    header = [
        "operation",
        "pools",
        "error",
        "us on the device",
        "host us",
        "eager / this",
        "private bmm / this",
        "share of the limit",
    ]
    return (
        f"Copy {limits.copy / 1e12:.2f} TB/s (read and written); matrix products, T operations/s: "
        f"{rates}.\n\n{markdown_table(header, rows)}"
    )


def measure_all(shape: Shape, device: torch.device, rounds: int) -> tuple[Limits, list[Result]]:
    """Every operation in every dtype."""
    limits = measure_limits(device)
    results = []
    for dtype in DTYPES:
        data = Data(shape, dtype, device)
        results += [run_case(case, data, limits, rounds) for case in cases(data)]
        del data
    return limits, results


def main(arguments: Sequence[str]) -> int:
    """Check and measure, print the table, write JSON if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="toy size on the CPU, interpreted")
    parser.add_argument("--rounds", type=int, default=6, help="of 16 calls each")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--out", type=Path, help="file for the raw measurements, JSON")
    options = parser.parse_args(arguments)
    if not options.tiny and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2

    torch.manual_seed(options.seed)
    device = torch.device("cpu" if options.tiny else "cuda")
    shape = TINY if options.tiny else Shape()
    facts: dict[str, Any] = machine(torch.get_num_threads())
    facts |= {"triton": package_version("triton"), "seed": options.seed}
    with torch.inference_mode():
        limits, results = measure_all(shape, device, options.rounds)
    print(f"{machine_line(facts)}; triton {facts['triton']}; seed {options.seed}\n")
    print("`" + command_line(__file__, arguments, facts["threads"]) + "`\n")
    if options.tiny:
        print("Toy size in Triton's interpreter: the times mean nothing.\n")
    print(render(results, limits))
    raw = {"machine": facts, "shape": asdict(shape), "limits": asdict(limits)}
    write_json(options.out, raw | {"results": [asdict(result) for result in results]})
    return 0 if all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
