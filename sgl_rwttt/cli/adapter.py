"""``sgl-rwttt adapter``: a snapshot of ``--ttt-backend lora_delta`` as a PEFT adapter folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .parsers import Commands

DESCRIPTION = """\
Write the adapter that a snapshot file holds as a folder that the PEFT library loads. The way back
is `sgl-rwttt serve MODEL --ttt-backend lora_delta --ttt-adapter FOLDER`.
"""


def add_parser(commands: Commands) -> None:
    """Add the subcommand to the main parser."""
    parser = commands.add_parser(
        "adapter",
        help="write a lora_delta snapshot as a PEFT adapter folder",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("snapshot", type=Path, help="a file of --ttt-snapshot-dir")
    parser.add_argument("folder", type=Path, help="made when it does not exist")
    parser.add_argument("--base-model", default="", help="what the folder names as its base model")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder and print it."""
    from sgl_rwttt.core.errors import StateError
    from sgl_rwttt.srt_ext.adapter_export import export_adapter

    try:
        export_adapter(arguments.snapshot, arguments.folder, arguments.base_model)
    except StateError as error:
        print(f"sgl-rwttt: {arguments.snapshot}: {error}", file=sys.stderr)
        return 1
    print(arguments.folder)
    return 0
