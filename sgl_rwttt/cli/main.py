"""Entry point of the ``sgl-rwttt`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sgl_rwttt import __version__

from . import adapter, bench, convert, embedded, env, inspect, run, serve
from .errors import FAILED, INTERRUPTED, USAGE, CommandFailed, UsageError

DESCRIPTION = """\
Serve models that keep learning while they answer: every request owns fast weights, which SGLang
batches, forks and rolls back together with its KV cache.

  sgl-rwttt serve embedded --port 30000    a small built-in model, no download, CPU or GPU
  sgl-rwttt serve ./my-ttt-checkpoint      an In-Place TTT checkpoint (ttt_mode in config.json)
  sgl-rwttt convert ./Qwen3-0.6B ./out     make such a checkpoint, without training
  sgl-rwttt run prog.py:ask --arg q=Hi     run a program, in process or with --url on a server
  sgl-rwttt inspect http://127.0.0.1:30000 what a server holds; or a snapshot file
  sgl-rwttt bench list                     the benchmarks
"""

EPILOG = """\
exit status: 0 success, 1 the command failed (the reason is on stderr), 2 wrong usage, 130 Ctrl-C
"""


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
    for module in (serve, run, inspect, convert, adapter, bench, embedded, env):
        module.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Wrong usage and --help raise SystemExit."""
    from sgl_rwttt.core.errors import StateError
    from sgl_rwttt.models.embedded import EmbeddedModelError

    options = build_parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except UsageError as error:
        print(f"sgl-rwttt: {error}", file=sys.stderr)
        return USAGE
    except StateError as error:
        print(f"sgl-rwttt: {type(error).__name__}: {error}", file=sys.stderr)
        return FAILED
    except (CommandFailed, EmbeddedModelError, OSError) as error:
        print(f"sgl-rwttt: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("sgl-rwttt: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


if __name__ == "__main__":
    sys.exit(main())
