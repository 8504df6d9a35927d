"""The context part of a snapshot: the tokens with their modes, the open tail, and their KV.

It stands behind the committed version's own data, as one more header field (JSON) and tensors of
its own. See docs/snapshots.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.contexts import Point, check_point, extends_root
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.snapshots import Chain, slots_of
from sgl_rwttt.core.spans import ModeSpans

from .snapshot_fields import decode_chain, encode_chain, refuse

CONTEXT_FORMAT = "sgl_rwttt context 1"

Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

ROOT = "root."  # begins the names of the root's own tensors
_KV_DTYPES = {str(each)[6:]: each for each in (torch.float32, torch.bfloat16, torch.float16)}
_KV = re.compile(r"(\w+) (\d{1,6})x(\d{1,6})x(\d{1,6})x(\d{1,6})")
_RUN = re.compile(r"([wr])([1-9]\d{0,9})")
_MODES = {"w": Effect.WRITE, "r": Effect.READ}
_TYPES = {
    "state_id": str,
    "position": int,
    "tail": int,
    "modes": str,
    "root": str,
    "kv": str,
    "client": str,
    "checksum": str,
    "kv_checksum": str,
}


def is_of_context(name: str) -> bool:
    """Whether a tensor of a file belongs to the context, or its KV, and not to the version."""
    return name == "tokens" or name.startswith((ROOT, "tail.", "kv."))


class Shapes(Protocol):
    """What a backend says of the tensors that it exports."""

    def layout(self, pages: int, base: bool) -> Layout:
        """See ``StateBackend.layout``."""
        ...

    def tail_layout(self, rows: int) -> Layout:
        """See ``StateBackend.tail_layout``."""
        ...


@dataclass(frozen=True)
class KVShape:
    """What the KV of one token is: per layer, K [heads, size] and V [heads, value size]."""

    layers: int
    heads: int
    size: int
    value_size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype} {self.layers}x{self.heads}x{self.size}x{self.value_size}"

    def layout(self, tokens: int) -> Layout:
        """The tensors of so many tokens."""
        outer = (self.layers, tokens, self.heads)
        return {
            "kv.K": (self.dtype, (*outer, self.size)),
            "kv.V": (self.dtype, (*outer, self.value_size)),
        }


@dataclass(frozen=True)
class Context:
    """The header field ``context``. Nothing in it is to be believed before ``point``."""

    state_id: str  # of the point
    position: int  # tokens
    tail: int  # rows of the open tail
    modes: ModeSpans
    root: Chain  # of the context's root
    kv: KVShape
    client: str  # JSON of whoever saved, not looked at
    checksum: str  # SHA-256 of the root's, the tail's and the tokens' bytes
    kv_checksum: str

    def encode(self) -> str:
        """The field's text."""
        fields = {
            **{name: getattr(self, name) for name in _TYPES},
            "modes": " ".join(f"{m.value[0]}{b - a}" for a, b, m in self.modes.runs()),
            "root": encode_chain(self.root),
            "kv": str(self.kv),
        }
        return json.dumps(fields, separators=(",", ":"))

    def layouts(self, head: Chain, shapes: Shapes) -> tuple[Layout, Layout]:
        """(root, tail and tokens; KV): the tensors behind those of the version ``head``."""
        root: Layout = {}
        if head[: len(self.root)] != self.root:
            pages, bases = slots_of(self.root)
            root = {ROOT + k: each for k, each in shapes.layout(pages, bases > 0).items()}
        tokens: Layout = {"tokens": (torch.int64, (self.position,))}
        return {**root, **shapes.tail_layout(self.tail), **tokens}, self.kv.layout(self.position)

    def point(self, head: Chain, tokens: Sequence[int], chunk: int, root: bytes) -> Point:
        """The point that the file holds; ``root`` is the id of its default root.

        Raises IncompatibleSnapshot unless chains, ids and tail are those of the tokens.
        """
        context = ContextChain(self.root[-1].id, chunk, self.root[-1].number)
        context.sync(tokens, self.modes)
        point = Point(self.root, head, context, self.position)
        check_point(point, {root})
        clock = context.clock_at(self.position)
        if (self.tail, self.state_id) != (clock.rows, clock.state_id.hex()):
            refuse("context", f"its tokens lead to {clock.state_id.hex()} with {clock.rows} rows")
        return point


def parse_context(text: str) -> Context:
    """The inverse of ``Context.encode``; raises IncompatibleSnapshot."""
    try:
        fields = json.loads(text)
        fits = {name: type(value) for name, value in fields.items()} == _TYPES
    except (ValueError, RecursionError, AttributeError) as error:
        refuse("context", f"not a JSON object: {type(error).__name__}")
    if not fits:
        refuse("context", f"its fields are not {sorted(_TYPES)}")
    modes = _parse_modes(fields["modes"])
    position, tail = fields["position"], fields["tail"]
    if not (0 < position == len(modes) and 0 <= tail <= position):
        refuse("context", f"{position} tokens, {len(modes)} modes, a tail of {tail}")
    parsed = {"modes": modes, "root": decode_chain(fields["root"]), "kv": _parse_kv(fields["kv"])}
    return Context(**{**fields, **parsed})


def _parse_modes(text: str) -> ModeSpans:
    spans = ModeSpans()
    for word in text.split(" "):
        found = _RUN.fullmatch(word)
        if found is None:
            refuse("context", f"{word[:20]!r} is no run of a mode")
        spans.append(int(found[2]), _MODES[found[1]])
    return spans


def _parse_kv(text: str) -> KVShape:
    found = _KV.fullmatch(text)
    if found is None or found[1] not in _KV_DTYPES:
        refuse("context", f"{text[:80]!r} is no KV shape")
    layers, heads, size, value_size = (int(found[i]) for i in range(2, 6))
    return KVShape(layers, heads, size, value_size, _KV_DTYPES[found[1]])


def check_context(context: Context, most: int, kv: KVShape) -> None:
    """Raise IncompatibleSnapshot unless a server takes so many tokens and has KV of this shape."""
    if context.position > most:
        refuse("position", f"the file has {context.position} tokens, this server takes {most}")
    if context.kv != kv:
        refuse("kv", f"the file has {context.kv}, this server {kv}")


def check_tokens(tokens: Sequence[int], vocabulary: int) -> None:
    """Raise IncompatibleSnapshot for a token id that the model does not have."""
    if not (min(tokens) >= 0 and max(tokens) < vocabulary):
        refuse("tokens", f"token ids must be in [0, {vocabulary})")


def root_tensors(tensors: Mapping[str, Any], point: Point, shapes: Shapes) -> dict[str, Any]:
    """What a version's restore takes for the context's root, out of all tensors of a file."""
    if not extends_root(point):
        return {k.removeprefix(ROOT): each for k, each in tensors.items() if k.startswith(ROOT)}
    pages, bases = slots_of(point.root)
    layout = shapes.layout(pages, bases > 0)
    return {k: tensors[k][:, : shape[1]] for k, (_, shape) in layout.items() if k in tensors}
