"""``sgl-rwttt convert``: make an In-Place TTT checkpoint of a plain one, without training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from sgl_rwttt.models.embedded import DType

from .errors import OK, CommandFailed, UsageError
from .parsers import Commands, is_shown, positive

if TYPE_CHECKING:
    from sgl_rwttt.models.convert import Conversion
    from sgl_rwttt.models.measure import LayerStats

DESCRIPTION = """\
Make an In-Place TTT checkpoint of a llama or qwen3 checkpoint, without training, and say whether it
helps.

  sgl-rwttt convert ./Qwen3-0.6B ./Qwen3-0.6B-ttt
  sgl-rwttt convert model.gguf ./model-ttt --dtype bfloat16
  sgl-rwttt serve ./Qwen3-0.6B-ttt

The recipe writes "after this h, expect that token" into the down projections of a few layers. It
needs to know how large h is there (kappa = 1 / mean |h|^2) and in which layers no row is so much
larger than the others that it would drown them (attention sinks: mostly the first token). Both are
measured by running the model on a text; then the deepest layers without a sink are taken.

At the end the model adapts on documents that it was not measured with, drops the context, and reads
them again, and other texts too. What that does to the loss is printed, as mean +- standard error
over the documents, and in one sentence. A conversion that does not help is written all the same.

Everything runs on the CPU in float32: it takes 4 bytes of memory per weight, and 2 more when it is
written in 16 bits. Nothing is downloaded. DST appears complete or not at all.
"""


def add_parser(commands: Commands) -> None:
    """Add the subcommand to the main parser."""
    parser = commands.add_parser(
        "convert",
        help="make a TTT checkpoint of a llama or qwen3 checkpoint",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="sgl-rwttt convert SRC DST [options]",
    )
    add = parser.add_argument
    add("source", metavar="SRC", type=Path, help="a checkpoint folder with safetensors, or a .gguf")
    add("target", metavar="DST", type=Path, help="the folder to make; must not exist or be empty")
    add("--recipe", choices=["hebbian"], default="hebbian", help="default: hebbian")
    add("--layers", metavar="N,N", type=_layers, help="layers with fast weights (default: picked)")
    add("--chunk", metavar="C", type=positive, default=32, help="tokens per update (default: 32)")
    add("--kappa", metavar="K,K", type=_numbers, help="one per --layers (default: measured)")
    add("--lr", metavar="R", type=float, help="learning rate (default: kappa of the first layer)")
    add("--gain", metavar="G", type=float, help="size of one association (default: measured)")
    add("--dtype", choices=get_args(DType), help="of the weights (default: as in SRC)")
    add("--text", metavar="FILE", type=Path, help="text to measure with (default: a built-in one)")
    add(
        "--held-out",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="document for the check (repeat it, at least two; default: three built-in ones)",
    )
    add("--no-check", action="store_true", help="leave the held-out check out")
    add("--overwrite", action="store_true", help="replace DST")
    add("--quiet", action="store_true", help="no progress bar; print the folder alone")
    parser.set_defaults(run=run)


def _layers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(each) for each in text.split(","))


def run(options: argparse.Namespace) -> int:
    """Convert, then print what was measured, chosen and found."""
    from sgl_rwttt.models.convert import Settings, check_target, convert

    try:
        settings = Settings(
            layers=options.layers,
            kappa=options.kappa,
            chunk=options.chunk,
            lr=options.lr,
            gain=options.gain,
            dtype=options.dtype,
            sample=options.text,
            documents=tuple(options.held_out),
            is_checked=not options.no_check,
            overwrite=options.overwrite,
        )
        check_target(options.source, options.target, options.overwrite)
    except (ValueError, FileExistsError) as error:
        raise UsageError(str(error)) from error
    try:
        done = convert(options.source, options.target, settings, is_shown(options.quiet))
    except ValueError as error:
        raise CommandFailed(str(error)) from error
    print(done.folder if options.quiet else report(done))
    return OK


def report(done: Conversion) -> str:
    """What the command prints."""
    recipe, lines = done.recipe, []
    if done.measured is not None:
        lines += [
            f"measured on {done.measured.tokens} tokens:",
            "  layer     kappa     sink    peak",
        ]
        lines += [_row(stats, stats.layer in recipe.layers) for stats in done.measured.layers]
        lines.append("  sink: |h|^2 of first rows, peak: of the largest other row, over the mean")
    layers = ", ".join(map(str, recipe.layers))
    lines.append(
        f"hebbian: layers {layers}; chunk {recipe.chunk}, lr {recipe.lr:.4g}, "
        f"gain {recipe.gain:.4g}"
    )
    if done.held_out is not None:
        lines += [
            "held-out check in float32, empty context, after adapting on one document:",
            f"  the document itself  {done.held_out.reread}",
            f"  another document     {done.held_out.unrelated}",
            done.held_out.verdict,
        ]
    lines.append(f"{done.folder} ({done.dtype})")
    return "\n".join(lines)


def _row(stats: LayerStats, is_taken: bool) -> str:
    mark = "  taken" if is_taken else "" if stats.is_quiet else "  sink"
    return f"  {stats.layer:5}  {stats.kappa:.2e} {stats.sink:8.4g} {stats.peak:7.4g}{mark}"
