"""The snapshot format: one safetensors file with a header that says what it fits.

Everything is checked before it is believed: sizes against the file's own size, the header's fields
against the model, both checksums, every number for being finite. See docs/snapshots.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from sgl_rwttt.core.lineage import cleared_root_id
from sgl_rwttt.core.snapshots import Chain, check_chain, slots_of

from .snapshot_context import CONTEXT_FORMAT, Context, Layout, Shapes, is_of_context, parse_context
from .snapshot_fields import decode_chain, encode_chain, refuse

FORMAT = "sgl_rwttt snapshot 1"
MAX_HEADER_BYTES = 4 << 20

_FITS = ("format", "layers", "chunk", "dtype", "rule", "fingerprint")  # compared in this order
_FIELDS = {*_FITS, "version", "version_id", "state_id", "chain", "checksum", "header_checksum"}
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
}
_BLANK = "0" * 64


class Fit(NamedTuple):
    """What a file must be for a server, in one form of its rule."""

    fields: Mapping[str, str]  # values that the header must have
    root: bytes  # id of the default root
    shapes: Shapes


class Sections(NamedTuple):
    """The data of a file, in its order; each has a checksum of its own."""

    version: Layout  # what reading the version takes
    context: Layout  # root, tail and tokens; empty in a file without a context
    kv: Layout


@dataclass(frozen=True)
class Header:
    """A parsed header. Nothing in it is to be believed before ``check``."""

    fields: dict[str, str]
    tensors: dict[str, Any]  # name -> {"dtype", "shape", "data_offsets"}
    raw: bytes  # length prefix and header as they stand in the file
    size: int  # bytes of the whole file

    @property
    def chain(self) -> Chain:
        """The saved version's chain; raises IncompatibleSnapshot."""
        return decode_chain(self.fields["chain"])

    @cached_property
    def context(self) -> Context | None:
        """The context part, None in a file without; raises IncompatibleSnapshot."""
        text = self.fields.get("context")
        return None if text is None else parse_context(text)

    def fit(self, fits: Sequence[Fit]) -> Fit:
        """The one of the file's own rule, else the first."""
        mine = (fit for fit in fits if fit.fields["rule"] == self.fields["rule"])
        return next(mine, fits[0])

    def check(self, fit: Fit) -> Sections:
        """Raise IncompatibleSnapshot, naming the field, unless the file fits this model.

        Whether the KV fits is not looked at. Returns the file's layout. The data is not read.
        """
        for field in _FITS:
            accepted = CONTEXT_FORMAT if "context" in self.fields and field == "format" else ""
            given, wanted = self.fields[field], fit.fields[field]
            if given not in (wanted, accepted):
                refuse(field, f"the file has {given!r}, this server {wanted!r}")
        chain = self.chain
        check_chain(chain, {fit.root})
        last = chain[-1]
        for field, value in (
            ("version", str(last.number)),
            ("version_id", last.id.hex()),
            ("state_id", cleared_root_id(last.id).hex()),
        ):
            if self.fields[field] != value:
                refuse(field, f"the file has {self.fields[field]!r}, its chain {value!r}")
        found = sections_of(chain, self.context, fit.shapes)
        whole = merged(found)
        if self.tensors != _descriptors(whole):
            refuse(
                "shapes", f"the tensors are not {list(whole)} of this model at {len(chain)} links"
            )
        self.check_data(whole)
        return found

    def check_data(self, whole: Layout) -> None:
        """Raise IncompatibleSnapshot unless the header was not changed and ``whole`` fills the file
        behind it."""
        if self.fields["header_checksum"] != _header_digest(self.raw, self.fields):
            refuse("header_checksum", "the header was changed")
        if self.size != len(self.raw) + data_bytes(whole):
            refuse("length", f"{self.size} bytes, not {len(self.raw) + data_bytes(whole)}")

    def checksum(self, section: str) -> str:
        """The checksum that the header gives for a section."""
        if section == "version":
            return self.fields["checksum"]
        assert self.context is not None
        return self.context.checksum if section == "context" else self.context.kv_checksum


def stored_sections(header: Header) -> Sections:
    """What a header lists, for a reader without a model to compare with.

    Raises IncompatibleSnapshot when it does not fill the file, or the header was changed.
    """
    kinds = {name: dtype for dtype, name in _DTYPES.items()}
    try:
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            name: (kinds[each["dtype"]], tuple(map(int, each["shape"])))
            for name, each in header.tensors.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        refuse("header", f"not a list of tensors: {type(error).__name__}")
    if header.tensors != _descriptors(found):
        refuse("shapes", "the tensors do not lie one behind the other")
    header.check_data(found)
    names = list(found)
    start = next((i for i, name in enumerate(names) if is_of_context(name)), len(names))
    version = {name: found[name] for name in names[:start]}
    return Sections(version, {name: found[name] for name in names[start:]}, {})


def sections_of(chain: Chain, context: Context | None, shapes: Shapes) -> Sections:
    """The layout of a file with a chain's last version, and a context."""
    pages, bases = slots_of(chain)
    version = shapes.layout(pages, bases > 0)
    return Sections(version, *(({}, {}) if context is None else context.layouts(chain, shapes)))


def merged(sections: Sections) -> Layout:
    """All tensors of a file, in their order."""
    return {**sections.version, **sections.context, **sections.kv}


def data_bytes(layout: Layout) -> int:
    """Bytes of the file's data section."""
    return sum(_nbytes(dtype, shape) for dtype, shape in layout.values())


def blank_header(
    fits: Mapping[str, str], chain: Chain, layout: Layout, context: Context | None = None
) -> bytes:
    """Length prefix and header of a file, with the version's and the header's checksum blank.

    Its size is final.

    Raises IncompatibleSnapshot for a chain too long for a header.
    """
    last = chain[-1]
    fields = {
        **{field: fits[field] for field in _FITS},
        "version": str(last.number),
        "version_id": last.id.hex(),
        "state_id": cleared_root_id(last.id).hex(),
        "chain": encode_chain(chain),
        "checksum": _BLANK,
        "header_checksum": _BLANK,
    }
    if context is not None:
        fields |= {"format": CONTEXT_FORMAT, "context": context.encode()}
    header = {"__metadata__": fields, **_descriptors(layout)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        refuse("header", f"{len(chain)} versions do not fit {MAX_HEADER_BYTES} bytes")
    return len(text).to_bytes(8, "little") + text


def write(
    stream: BinaryIO,
    blank: bytes,
    version: Mapping[str, Tensor],
    more: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a file: the sealed header, the version's tensors (CPU, contiguous), those of its
    context; each in their order.
    """
    raw = _with(blank, "checksum", _BLANK, checksum_of(version))
    stream.write(_with(raw, "header_checksum", _BLANK, sha256(raw).hexdigest()))
    for tensor in (*version.values(), *(more or {}).values()):
        stream.write(_buffer(tensor))


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the tensors' bytes, in their order."""
    digest = sha256()
    for tensor in tensors.values():
        digest.update(_buffer(tensor))
    return digest.hexdigest()


def read_header(stream: BinaryIO, size: int) -> Header:
    """Parse the header of a file of ``size`` bytes; raises IncompatibleSnapshot."""
    prefix = stream.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        refuse("length", f"a header of {length} bytes in a file of {size}")
    text = stream.read(length)
    if len(text) < length:
        refuse("length", "the file became shorter while it was read")
    try:
        tensors = json.loads(text)
        fields = tensors.pop("__metadata__")
        known = _FIELDS | ({"context"} if fields["format"] == CONTEXT_FORMAT else set())
        fits = set(fields) == known and all(type(value) is str for value in fields.values())
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        refuse("header", f"not a header: {type(error).__name__}")
    if not fits:
        refuse("header", f"its fields are not {sorted(_FIELDS)}")
    return Header(fields, tensors, prefix + text, size)


def read_section(
    stream: BinaryIO, header: Header, sections: Sections, name: str
) -> dict[str, Tensor]:
    """Read one section of a checked header's file; raises IncompatibleSnapshot.

    Memory is taken only for what ``header.check`` found the file to be long enough for.
    """
    before = Sections._fields[: Sections._fields.index(name)]
    skipped = sum(data_bytes(getattr(sections, each)) for each in before)
    stream.seek(len(header.raw) + skipped)
    tensors: dict[str, Tensor] = {}
    for key, (dtype, shape) in getattr(sections, name).items():
        tensors[key] = torch.empty(shape, dtype=dtype)
        buffer = _buffer(tensors[key])
        if stream.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            refuse("length", "the file became shorter while it was read")
    if checksum_of(tensors) != header.checksum(name):
        refuse("checksum", "the data was changed")
    check_finite(tensors)
    return tensors


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise IncompatibleSnapshot naming the first tensor with a number that is not finite."""
    for name, tensor in tensors.items():
        if (
            tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all()
        ):  # both are NaN if any is
            refuse(name, "it holds a number that is not finite")


def _descriptors(layout: Layout) -> dict[str, Any]:
    found, at = {}, 0
    for name, (dtype, shape) in layout.items():
        end = at + _nbytes(dtype, shape)
        found[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    return found


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    count = dtype.itemsize
    for side in shape:
        count *= side
    return count


def _buffer(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).view(torch.uint8).numpy())


def _header_digest(raw: bytes, fields: Mapping[str, str]) -> str:
    given = fields["header_checksum"]
    return sha256(_with(raw, "header_checksum", given, _BLANK)).hexdigest()


def _with(raw: bytes, field: str, old: str, new: str) -> bytes:
    """``raw`` with one field's value replaced."""
    return raw.replace(f'"{field}":"{old}"'.encode(), f'"{field}":"{new}"'.encode(), 1)
