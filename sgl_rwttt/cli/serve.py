"""``sgl-rwttt serve``: start an SGLang server with the defaults that this machine needs."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from sgl_rwttt.models.embedded import ensure
from sgl_rwttt.srt_ext.launch import cli_args, data_parallel_ranks, prepare_environment

from .parsers import Commands

DESCRIPTION = """\
Start `python -m sglang.launch_server` for MODEL. What you give after MODEL goes to SGLang unchanged
and wins over the defaults added here:

  everywhere          --host 127.0.0.1 (no other machine can connect)
  TTT checkpoint      --radix-cache-backend ttt --disable-overlap-schedule
  without a GPU       --device cpu --attention-backend rwttt_cpu (torch_native for a checkpoint
                      that is not TTT) --sleep-on-idle,
                      --dtype as in the checkpoint, --max-total-tokens for 1 GiB of KV
  with a GPU          --device cuda --attention-backend flashinfer,
                      --dtype bfloat16 for a float32 checkpoint

SGLang's own flags and the --ttt-* flags: sgl-rwttt serve MODEL --help
"""


def add_parser(commands: Commands) -> None:
    """Add the subcommand to the main parser."""
    parser = commands.add_parser(
        "serve",
        help="start an SGLang server for a TTT checkpoint (or any other)",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="sgl-rwttt serve MODEL [SGLang flags ...]",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a checkpoint folder, a hub name, or the word `embedded` for the built-in model",
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Replace this process by the server; returns only when the model cannot be made."""
    model = os.fspath(ensure()) if arguments.model == "embedded" else arguments.model
    prepare_environment(ranks=data_parallel_ranks(arguments.flags))
    command = [sys.executable, "-m", "sglang.launch_server", *cli_args(model, arguments.flags)]
    print(f"+ {shlex.join(command)}", file=sys.stderr, flush=True)
    os.execve(command[0], command, dict(os.environ))
