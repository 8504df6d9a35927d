"""``sgl-rwttt env``: the environment variables that a plain SGLang launch needs here."""

from __future__ import annotations

import argparse
import os
import shlex

from sgl_rwttt.srt_ext.launch import cpu_environment

from .parsers import Commands

DESCRIPTION = """\
Print, as shell commands, the variables that SGLang needs on this machine when it is started by
other means than sgl-rwttt serve:

  eval "$(sgl-rwttt env)"
  python -m sglang.launch_server --model-path ... --attention-backend rwttt_cpu

Without a CUDA device these are SGLANG_USE_CPU_ENGINE=1 and a PYTHONPATH with a stand-in for the
package sgl_kernel, whose published build cannot be imported there. With a CUDA device, none.
"""


def add_parser(commands: Commands) -> None:
    """Add the subcommand to the main parser."""
    parser = commands.add_parser(
        "env",
        help="print the environment variables that a plain SGLang launch needs",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run(_arguments: argparse.Namespace) -> int:
    """Print one ``export`` line per variable, or a comment when there is nothing to set."""
    variables = cpu_environment(os.environ.get("PYTHONPATH", ""))
    for name, value in variables.items():
        print(f"export {name}={shlex.quote(value)}")
    if not variables:
        print("# a CUDA device was found: SGLang needs no variables from sgl_rwttt")
    return 0
