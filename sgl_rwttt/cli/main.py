"""Entry point of the ``sgl-rwttt`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sgl_rwttt import __version__

from . import adapter, embedded, env, serve

DESCRIPTION = """\
Serve models that keep learning while they answer: every request owns fast weights, which SGLang
batches, forks and rolls back together with its KV cache.

  sgl-rwttt serve embedded --port 30000    a small built-in model, no download, CPU or GPU
  sgl-rwttt serve ./my-ttt-checkpoint      an In-Place TTT checkpoint (ttt_mode in config.json)
"""

EPILOG = "exit status: 0 success, 1 the command failed (the reason is on stderr), 2 wrong usage"


def build_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands; building it imports neither torch nor SGLang."""
    parser = argparse.ArgumentParser(
        prog="sgl-rwttt",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sgl-rwttt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (serve, embedded, env, adapter):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Wrong usage and --help raise SystemExit."""
    from sgl_rwttt.models.embedded import EmbeddedModelError

    arguments = build_parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except (EmbeddedModelError, OSError) as error:
        print(f"sgl-rwttt: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
