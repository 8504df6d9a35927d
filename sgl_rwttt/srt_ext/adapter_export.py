"""A snapshot of a LoRA delta as an adapter folder of the PEFT library."""

from __future__ import annotations

import re
from pathlib import Path

from sgl_rwttt.backends.lora_peft import save_adapter

from . import snapshot_file


def export_adapter(snapshot: Path, folder: Path, base_model: str) -> None:
    """Write the adapter of a snapshot file as a PEFT folder; ``base_model`` is named as its base.

    Raises OSError, or IncompatibleSnapshot for a file that is broken, of another rule, or of a
    state that never learnt anything; nothing is written then.
    """
    with snapshot.open("rb") as file:
        header = snapshot_file.read_header(file, snapshot.stat().st_size)
        rule = header.fields["rule"]
        alpha = re.fullmatch(r"lora_delta .*\balpha=(\S+) .*", rule)
        if alpha is None:
            snapshot_file.refuse("rule", f"{rule[:80]!r} is not lora_delta")
        sections = snapshot_file.stored_sections(header)
        if not sections.version:
            snapshot_file.refuse("shapes", "the state is still what every owner starts from")
        tensors = snapshot_file.read_section(file, header, sections, "version")
    save_adapter(folder, tensors, float(alpha[1]), base_model)
