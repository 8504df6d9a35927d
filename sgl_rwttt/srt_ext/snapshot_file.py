"""The snapshot format: one safetensors file with a header that says what it fits.

Everything is checked before it is believed: sizes against the file's own size, the header's fields
against the model, both checksums, every number for being finite. See docs/snapshots.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor

from sgl_rwttt.core.errors import IncompatibleSnapshot
from sgl_rwttt.core.lineage import cleared_root_id
from sgl_rwttt.core.snapshots import Chain, Link, check_chain, pages_of

FORMAT = "sgl_rwttt snapshot 1"
MAX_HEADER_BYTES = 4 << 20

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

_FITS = ("format", "layers", "chunk", "dtype", "rule", "fingerprint")  # compared in this order
_FIELDS = {*_FITS, "version", "version_id", "state_id", "chain", "checksum", "header_checksum"}
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_BLANK = "0" * 64
_LETTERS = {"root": "r", "base": "b", "page": "p", "slot": "s", "same": "n", "clear": "c"}
_KINDS = {letter: kind for kind, letter in _LETTERS.items()}
_LINK = re.compile(r"([rbpsnc])(0|[1-9][0-9]{0,15}):([0-9a-f]{32})")


def refuse(field: str, reason: str) -> NoReturn:
    """Raise IncompatibleSnapshot for one field."""
    raise IncompatibleSnapshot(f"{field}: {reason}")


def encode_chain(chain: Chain) -> str:
    """Links as "<kind><version number>:<id>", separated by spaces, oldest first."""
    return " ".join(f"{_LETTERS[adds]}{number}:{id.hex()}" for adds, number, id in chain)


def decode_chain(text: str) -> Chain:
    """The inverse of ``encode_chain``; raises IncompatibleSnapshot."""
    links: list[Link] = []
    for word in text.split(" "):
        found = _LINK.fullmatch(word)
        if found is None:
            refuse("chain", f"{word[:80]!r} is no link")
        kind: Any = _KINDS[found[1]]
        links.append(Link(kind, int(found[2]), bytes.fromhex(found[3])))
    return tuple(links)


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

    def check(
        self, fits: Mapping[str, str], root: bytes, layout: Callable[[int, bool], Layout]
    ) -> Layout:
        """Raise IncompatibleSnapshot, naming the field, unless the file fits this model.

        ``fits`` are the values that a file must have, ``root`` is the id of the default root,
        ``layout(pages, base)`` the tensors of a version. Returns the file's layout. The data is
        not read.
        """
        for field in _FITS:
            if self.fields[field] != fits[field]:
                refuse(field, f"the file has {self.fields[field]!r}, this server {fits[field]!r}")
        chain = self.chain
        check_chain(chain, root)
        last = chain[-1]
        for field, value in (
            ("version", str(last.number)),
            ("version_id", last.id.hex()),
            ("state_id", cleared_root_id(last.id).hex()),
        ):
            if self.fields[field] != value:
                refuse(field, f"the file has {self.fields[field]!r}, its chain {value!r}")
        found = layout_of(chain, layout)
        if self.tensors != _descriptors(found):
            refuse(
                "shapes", f"the tensors are not {list(found)} of this model at {len(chain)} links"
            )
        if self.fields["header_checksum"] != _header_digest(self.raw, self.fields):
            refuse("header_checksum", "the header was changed")
        if self.size != len(self.raw) + data_bytes(found):
            refuse("length", f"{self.size} bytes, not {len(self.raw) + data_bytes(found)}")
        return found


def stored_layout(header: Header) -> Layout:
    """The tensors that a header lists, for a reader without a model to compare with.

    Raises IncompatibleSnapshot when they do not fill the file, or the header was changed.
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
    if header.fields["header_checksum"] != _header_digest(header.raw, header.fields):
        refuse("header_checksum", "the header was changed")
    if header.size != len(header.raw) + data_bytes(found):
        refuse("length", f"{header.size} bytes, not {len(header.raw) + data_bytes(found)}")
    return found


def layout_of(chain: Chain, layout: Callable[[int, bool], Layout]) -> Layout:
    """The tensors of a chain's last version."""
    return layout(pages_of(chain), any(link.adds == "base" for link in chain))


def data_bytes(layout: Layout) -> int:
    """Bytes of the file's data section."""
    return sum(_nbytes(dtype, shape) for dtype, shape in layout.values())


def blank_header(fits: Mapping[str, str], chain: Chain, layout: Layout) -> bytes:
    """Length prefix and header of a file, with both checksums blank; its size is final.

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
    header = {"__metadata__": fields, **_descriptors(layout)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        refuse("header", f"{len(chain)} versions do not fit {MAX_HEADER_BYTES} bytes")
    return len(text).to_bytes(8, "little") + text


def write(stream: BinaryIO, blank: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Write a file: the sealed header, then the tensors (CPU, contiguous), in their order."""
    buffers = [_buffer(tensor) for tensor in tensors.values()]
    digest = sha256()
    for buffer in buffers:
        digest.update(buffer)
    raw = _with(blank, "checksum", _BLANK, digest.hexdigest())
    stream.write(_with(raw, "header_checksum", _BLANK, sha256(raw).hexdigest()))
    for buffer in buffers:
        stream.write(buffer)


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
        fits = set(fields) == _FIELDS and all(type(value) is str for value in fields.values())
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        refuse("header", f"not a header: {type(error).__name__}")
    if not fits:
        refuse("header", f"its fields are not {sorted(_FIELDS)}")
    return Header(fields, tensors, prefix + text, size)


def read_tensors(stream: BinaryIO, header: Header, layout: Layout) -> dict[str, Tensor]:
    """Read the data section of a checked header; raises IncompatibleSnapshot.

    The stream stands behind the header. Memory is taken only for what ``header.check`` found the
    file to be long enough for.
    """
    digest = sha256()
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape) in layout.items():
        tensors[name] = torch.empty(shape, dtype=dtype)
        buffer = _buffer(tensors[name])
        if stream.readinto(buffer) != len(buffer):  # type: ignore[attr-defined]
            refuse("length", "the file became shorter while it was read")
        digest.update(buffer)
    if digest.hexdigest() != header.fields["checksum"]:
        refuse("checksum", "the data was changed")
    check_finite(tensors)
    return tensors


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise IncompatibleSnapshot naming the first tensor with a number that is not finite."""
    for name, tensor in tensors.items():
        if not torch.stack(torch.aminmax(tensor)).isfinite().all():  # both are NaN if any is
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
