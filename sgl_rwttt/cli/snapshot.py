"""The header of a snapshot file (docs/snapshots.md), read without torch and without a server.

It says what is in a file and whether the file is whole. Whether it fits a model, only a server of
that model can say.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from sgl_rwttt.core.errors import IncompatibleSnapshot
from sgl_rwttt.srt_ext.snapshot_fields import decode_chain

from .errors import CommandFailed
from .tables import size, table

_MAX_HEADER_BYTES = 100_000_000
_VERSION = ("D", "H", "V")  # names of the version's own tensors
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Snapshot:
    """A file's header, and what a look at its bytes found."""

    path: Path
    size: int  # bytes of the file
    fields: dict[str, str]
    tensors: dict[str, Any]  # name -> {"dtype", "shape", "data_offsets"}, in the file's order
    problems: tuple[str, ...]  # what is not as the header says
    is_verified: bool  # whether the data was compared with its checksums

    @cached_property
    def context(self) -> dict[str, Any] | None:
        """The fields of the context part; None in a file with weights alone."""
        text = self.fields.get("context")
        return None if text is None else dict(json.loads(text))

    def to_json(self) -> dict[str, Any]:
        """Everything, as --json prints it."""
        return {
            "file": str(self.path),
            "bytes": self.size,
            **{name: value for name, value in self.fields.items() if name != "context"},
            "version": int(self.fields["version"]),
            "context": self.context,
            "tensors": self.tensors,
            "verified": self.is_verified,
            "problems": list(self.problems),
        }

    def __str__(self) -> str:
        fields = self.fields
        rows = [
            ("file", f"{self.path} ({size(self.size)})"),
            ("format", fields["format"]),
            ("version", f"{fields['version']} ({fields['version_id']})"),
            ("state id", fields["state_id"]),
            ("rule", fields["rule"]),
            ("layers", f"{fields['layers']}; chunk {fields['chunk']}, {fields['dtype']}"),
            ("fingerprint", fields["fingerprint"]),
            ("chain", chain_text(fields["chain"])),
        ]
        if self.context is not None:
            get = self.context.get
            text = f"{get('position')} tokens, {get('tail')} in the tail, KV {get('kv')}"
            rows += [("context", text), ("", f"state id {get('state_id')}")]
        verdict = "; ".join(self.problems) or (
            "verified" if self.is_verified else "header verified, data not read"
        )
        rows.append(("checksums", verdict))
        lines = [f"{name:<12} {value}" for name, value in rows]
        found = [
            (name, each["dtype"], "x".join(map(str, each["shape"])), size(_span(each)))
            for name, each in self.tensors.items()
        ]
        if found:
            lines += ["", table(("tensor", "dtype", "shape", "bytes"), found)]
        return "\n".join(lines)


def chain_text(chain: str) -> str:
    """What the versions of a chain add, in words; raises CommandFailed."""
    try:
        links = decode_chain(chain)
    except IncompatibleSnapshot as error:
        raise CommandFailed(str(error)) from error
    counts = Counter(link.adds for link in links)
    first = "the model's root" if counts["root"] else "a dense base"
    added = [
        f"{count} {name}{'' if count == 1 else 's'}"
        for name, count in (("page", counts["page"]), ("reset", counts["clear"]))
        if count
    ]
    return ", ".join([first, *added])


def read_snapshot(path: Path, verify: bool = True) -> Snapshot:
    """Read a file's header and, with `verify`, compare its data with the checksums.

    Raises CommandFailed for a file that is no snapshot, OSError.
    """
    with path.open("rb") as stream:
        length = path.stat().st_size
        raw, fields, tensors = _header(stream, path, length)
        problems = []
        if _digest_of_header(raw, fields) != fields["header_checksum"]:
            problems.append("the header was changed")
        end = len(raw) + max((each["data_offsets"][1] for each in tensors.values()), default=0)
        if end != length:
            problems.append(f"{length} bytes, not {end}")
        elif verify:
            problems += _compare(stream, len(raw), fields, tensors)
    return Snapshot(path, length, fields, tensors, tuple(problems), verify)


def _header(
    stream: BinaryIO, path: Path, length: int
) -> tuple[bytes, dict[str, str], dict[str, Any]]:
    prefix = stream.read(8)
    count = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or not 0 < count <= min(length - 8, _MAX_HEADER_BYTES):
        raise CommandFailed(f"{path} is no snapshot: it does not begin with a safetensors header")
    text = stream.read(count)
    try:
        tensors = dict(json.loads(text))
        fields = dict(tensors.pop("__metadata__", {}))
        for each in tensors.values():
            _span(each)
        is_ours = str(fields.get("format", "")).startswith("sgl_rwttt ")
        if is_ours:
            int(fields["version"])
            [fields[name] for name in _SHOWN]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CommandFailed(f"{path} is no snapshot: its header is damaged ({error!r})") from error
    if not is_ours:
        raise CommandFailed(f"{path} is a safetensors file, but no snapshot of sgl_rwttt")
    return prefix + text, fields, tensors


_SHOWN = (
    "version_id",
    "state_id",
    "rule",
    "layers",
    "chunk",
    "dtype",
    "fingerprint",
    "chain",
    "checksum",
    "header_checksum",
)


def _span(tensor: Any) -> int:
    first, end = tensor["data_offsets"]
    return int(end) - int(first)


def _digest_of_header(raw: bytes, fields: dict[str, str]) -> str:
    """SHA-256 of the header with zeros in the place of this very checksum."""
    given = f'"header_checksum":"{fields["header_checksum"]}"'.encode()
    return sha256(raw.replace(given, b'"header_checksum":"' + b"0" * 64 + b'"', 1)).hexdigest()


def _compare(
    stream: BinaryIO, start: int, fields: dict[str, str], tensors: dict[str, Any]
) -> list[str]:
    """Names of the sections whose data is not what its checksum says."""
    context = json.loads(fields.get("context", "{}"))
    expected = {
        "version": fields["checksum"],
        "context": context.get("checksum"),
        "KV": context.get("kv_checksum"),
    }
    digests = {name: sha256() for name in expected}
    stream.seek(start)
    for name, tensor in tensors.items():
        is_kv = name.startswith("kv.")
        digest = digests["version" if name in _VERSION else "KV" if is_kv else "context"]
        left = _span(tensor)
        while left > 0 and (block := stream.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
    return [
        f"the data of the {name} was changed"
        for name, given in expected.items()
        if given is not None and digests[name].hexdigest() != given
    ]
