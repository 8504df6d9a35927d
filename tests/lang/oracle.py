"""Programs replayed by plain Python: what a run must be, without any code of the package.

Ids come from hashlib after the formula of docs/architecture.md, tokens from a byte-level BPE of its
own, answers from its own model of the fake server, and what is alive on the server from what can
be reached, not from reference counts.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import regex

Item = tuple[int, int]  # token, 1 where it was read in write mode
HOLE = "\ufffd"
PIECES = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


class Refused(Exception):
    """What the package refuses; the argument is the name of its error."""


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def default_root() -> bytes:
    """H("r", fingerprint, rule) of the fake server."""
    return digest(b"r" + (3).to_bytes(8, "little") + b"toy" + b"in_place")


@dataclass(frozen=True)
class Point:
    """A place behind the items of a context."""

    version_id: bytes
    version: int
    tail: int
    state_id: bytes


def point(root: bytes, number: int, chunk: int, items: Sequence[Item]) -> Point:
    block, rows = b"", 0
    for token, is_write in items:
        block += (2 * token + is_write).to_bytes(8, "little")
        rows += is_write
        if rows == chunk:
            root, number, block, rows = digest(b"v" + root + block), number + 1, b"", 0
    return Point(root, number, rows, digest(b"t" + root + block) if block else root)


class Vocabulary:
    """The toy tokenizer's table, with an encoder and a decoder of its own."""

    def __init__(self, tokenizer: Any) -> None:
        table = json.loads(tokenizer.backend_tokenizer.to_str())
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        self.letter = {b: chr(b) for b in printable}
        self.letter |= {b: chr(256 + i) for i, b in enumerate(others)}
        byte = {c: b for b, c in self.letter.items()}
        self.ids: dict[str, int] = table["model"]["vocab"]
        self.rank = {tuple(pair): i for i, pair in enumerate(table["model"]["merges"])}
        self.special = {t["content"]: t["id"] for t in table["added_tokens"]}
        self.bytes = {
            i: bytes(byte[c] for c in s) for s, i in self.ids.items() if set(s) <= {*byte}
        }
        self.bytes |= {i: s.encode() for s, i in self.special.items()}
        self.split = regex.compile("(" + "|".join(map(regex.escape, self.special)) + ")")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self.split.split(text):
            if part in self.special:
                ids.append(self.special[part])
            else:
                for piece in PIECES.findall(part):
                    ids += self._merge([self.letter[b] for b in piece.encode()])
        return ids

    def _merge(self, parts: list[str]) -> list[int]:
        while True:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: self.rank.get(pair, math.inf), default=None)
            if best is None or best not in self.rank:
                return [self.ids[part] for part in parts]
            merged, i = [], 0
            while i < len(parts):
                is_pair = tuple(parts[i : i + 2]) == best
                merged.append("".join(parts[i : i + 1 + is_pair]))
                i += 1 + is_pair
            parts = merged

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.bytes.get(i, b"") for i in ids).decode("utf-8", "replace")


class Answers:
    """What the fake server says: a hash of the committed version and of the last three tokens."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        menu: Sequence[int],
        follow: dict[int, int],
        chunk: int,
        eos: int,
    ) -> None:
        self.root = default_root()
        self.vocabulary, self.chunk, self.eos = vocabulary, chunk, eos
        self.menu, self.follow = menu, follow

    def draw(self, version_id: bytes, tokens: Sequence[int]) -> float:
        data = version_id + repr(list(tokens)).encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") / 2**64

    def generate(
        self, root: bytes, number: int, items: list[Item], flag: int, limit: int, stops: list[Any]
    ) -> tuple[list[int], Any, list[float]]:
        """(output ids, the stop that matched, log-probabilities)."""
        output: list[int] = []
        logprobs: list[float] = []
        writes = sum(is_write for _, is_write in items)
        version = point(root, number, self.chunk, items).version_id
        while True:
            so_far = items + [(t, flag) for t in output]
            if flag and (writes + len(output)) % self.chunk == 0:
                version = point(root, number, self.chunk, so_far).version_id
            draw = self.draw(version, [t for t, _ in so_far[-3:]])
            number_drawn = 4 + int(draw * (len(self.vocabulary.bytes) - 4))
            token = self.menu[number_drawn % len(self.menu)]
            if number_drawn % 10 < 8:
                token = self.follow.get(so_far[-1][0], token)
            output.append(token)
            logprobs.append(math.log(max(draw, 1e-3)))
            said = self.vocabulary.decode(output)
            for stop in stops:
                if stop in said if isinstance(stop, str) else stop == output[-1]:
                    return output, stop, logprobs
            if len(output) == limit:
                return output, None, logprobs

    def logprobs(
        self, root: bytes, number: int, items: list[Item], ids: Sequence[int]
    ) -> list[float]:
        """Of `ids` read behind `items`."""
        whole = items + [(t, 0) for t in ids]
        found = []
        version = point(root, number, self.chunk, items).version_id
        for i in range(len(items), len(whole)):
            found.append(
                -self.draw(version, [t for t, _ in whole[max(i - 3, 0) : i + 1]]) * 5 - 0.01
            )
        return found


@dataclass(eq=False)
class Node:
    """A request as the server keeps it: trimmed tokens too."""

    parent: Node | None
    root: bytes
    items: list[Item]


@dataclass
class Place:
    """Where a branch stands, with all that a rollback brings back."""

    root: bytes
    number: int
    items: list[Item] = field(default_factory=list)
    consumed: int = 0
    ids: list[int] = field(default_factory=list)  # pending, then
    fill: str = ""
    node: Node | None = None
    messages: list[Any] = field(default_factory=list)
    role: str | None = None
    begin: int = 0
    variables: dict[str, Any] = field(default_factory=dict)
    logprobs: dict[str, list[float]] = field(default_factory=dict)

    def copy(self) -> Place:
        return replace(
            self,
            items=self.items[:],
            ids=self.ids[:],
            messages=self.messages[:],
            variables=dict(self.variables),
            logprobs=dict(self.logprobs),
        )


@dataclass(eq=False)
class Mark:
    """A checkpoint."""

    place: Place
    pin: object | None
    position: int
    version: int
    state_id: str


class World:
    """One run on one server."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.vocabulary = answers.vocabulary
        self.files: dict[str, tuple[bytes, int]] = {}
        self.branches: list[Branch] = []
        self.groups: list[Group] = []

    def start(self) -> Branch:
        return Branch(self, Place(self.answers.root, 0), None)

    def alive(self) -> tuple[list[Any], int, set[str]]:
        """(nodes, pins, roots) that the server must hold, and no others."""
        marks = {id(m): m for b in self.branches for m in (b.last, *b.named.values()) if m}
        places = [b.at for b in self.branches] + [m.place for m in marks.values()]
        nodes: dict[int, Node] = {}
        for place in places:
            node = place.node
            while node is not None:
                nodes[id(node)] = node
                node = node.parent
        pins = {id(m.pin) for m in marks.values() if m.pin} | {
            id(g.pin) for g in self.groups if g.pin
        }
        roots = {self.answers.root.hex()} | {place.root.hex() for place in places}
        kept = sorted((n.root.hex(), n.items[:]) for n in nodes.values())
        return kept, len(pins), roots


class Branch:
    """The verbs of a state."""

    def __init__(self, world: World, at: Place, parent: Branch | None) -> None:
        self.world, self.at, self.parent = world, at, parent
        self.answers, self.vocabulary = world.answers, world.vocabulary
        self.depth = self.locked = 0
        self.last: Mark | None = None
        self.named: dict[str, Mark] = {}
        world.branches.append(self)

    # Looking

    @property
    def flag(self) -> int:
        return 0 if self.depth else 1

    @property
    def tokens(self) -> list[int]:
        return [t for t, _ in self.at.items]

    def here(self) -> Point:
        return point(self.at.root, self.at.number, self.answers.chunk, self.at.items)

    def pending(self) -> str:
        return self.vocabulary.decode(self.at.ids) + self.at.fill

    def text(self) -> str:
        return self.vocabulary.decode(self.tokens) + self.pending()

    # Saying

    def fill(self, text: str) -> None:
        self.at.fill += text

    def begin(self, role: str) -> None:
        self.fill(f"<|im_start|>{role}\n")
        self.at.role, self.at.begin = role, len(self.text())

    def end(self, role: str) -> None:
        content = self.text()[self.at.begin :].lstrip()
        self.at.messages.append({"role": role, "content": content})
        self.fill("<|im_end|>\n")
        self.at.role = None

    def consume(self, output: Sequence[int] = ()) -> None:
        """One request: what is pending, and what was sampled after it."""
        at = self.at
        at.items += [(t, self.flag) for t in at.ids + self.vocabulary.encode(at.fill)]
        at.ids, at.fill, at.consumed = [], "", len(at.items)
        at.node = Node(at.node, at.root, at.items[:])

    def settle(self) -> bool:
        at = self.at
        if not at.ids and not at.fill and at.consumed == len(at.items):
            return False
        self.consume()
        return True

    def gen(self, name: str, limit: int, stops: Sequence[Any] = ()) -> None:
        self.consume()
        at, decode = self.at, self.vocabulary.decode
        strings = [*(s for s in stops if isinstance(s, str)), "<|im_end|>"]
        ends = [self.answers.eos, *(s for s in stops if not isinstance(s, str))]
        output, matched, logprobs = self.answers.generate(
            at.root, at.number, at.items, self.flag, limit, strings + ends
        )
        assert at.node is not None
        at.node.items += [(t, self.flag) for t in output]
        consumed = len(at.items) + len(output) - 1
        ids = output[:-1] if isinstance(matched, int) else output
        before, tokens = self.text(), self.tokens
        whole = decode(tokens + ids)
        start = max(n for n in range(len(before) + 1) if whole.startswith(before[:n]))
        if isinstance(matched, str):
            answer = whole[start:]
            whole = whole[: start + min(answer.find(s) for s in strings if s in answer)]
            covering = [
                n for n in range(len(ids) + 1) if whole.startswith(decode(tokens + ids[:n]))
            ]
            ids = ids[: max(covering)] if covering else []
            if not covering:  # a character begun before: what it would cut is not there to cut
                whole, start = before, len(before)
        at.items += [(t, self.flag) for t in ids]
        at.consumed = min(consumed, len(at.items))
        at.fill = whole[len(self.text()) :]
        at.variables[name] = whole[start:]
        at.logprobs[name] = (logprobs[: len(ids)] or logprobs) if self.parent else []

    def select(self, name: str, choices: Sequence[str]) -> None:
        self.settle()
        if not self.at.items:
            raise Refused("InvalidStateRequest")
        means = []
        for choice in choices:
            row = self._logprobs(self.vocabulary.encode(choice))
            means.append(math.fsum(row) / len(row))
        best = choices[means.index(max(means))]
        self.at.ids = self.vocabulary.encode(best)
        self.at.variables[name] = best
        self.at.logprobs[name] = []

    def score(self, text: str) -> list[float]:
        self.settle()
        return self._logprobs(self.vocabulary.encode(text))

    def _logprobs(self, ids: Sequence[int]) -> list[float]:
        return self.answers.logprobs(self.at.root, self.at.number, self.at.items, ids)

    def flush(self) -> None:
        self.settle()

    # Branching

    def _mark(self) -> tuple[Place, object | None]:
        pin = object() if self.settle() else None
        return self.at.copy(), pin

    def fork(self, size: int, at: str | None = None) -> Group:
        if at is None:
            place, pin = self._mark()
        else:
            mark = self._find(at)
            place, pin = mark.place, mark.pin
        children = []
        for _ in range(size):
            child = Branch(self.world, place.copy(), self)
            child.depth, child.locked = self.depth, self.locked
            child.last, child.named = self.last, dict(self.named)
            children.append(child)
        return Group(self, children, pin)

    def keep(self, branch: Branch) -> None:
        if branch.parent is not self:
            raise Refused("ForeignOwner")
        if branch.flag != self.flag:
            branch.settle()
        self.at = branch.at.copy()

    @contextmanager
    def peek(self) -> Iterator[Branch]:
        with self.fork(1) as group:
            group[0].depth = group[0].locked = 1
            yield group[0]

    @contextmanager
    def copy(self) -> Iterator[Branch]:
        with self.fork(1) as group:
            yield group[0]

    def checkpoint(self, name: str | None = None) -> Mark:
        place, pin = self._mark()
        here = self.here()
        mark = Mark(place, pin, len(place.items), here.version, here.state_id.hex())
        self.last = mark
        if name is not None:
            self.named[name] = mark
        return mark

    def rollback(self, to: str | None = None) -> None:
        mark = self._find(to)
        self.at, self.last = mark.place.copy(), mark

    def _find(self, name: str | None) -> Mark:
        mark = self.last if name is None else self.named.get(name)
        if mark is None:
            raise Refused("RollbackBeyondRetention")
        return mark

    # Modes, contexts, files

    def freeze(self) -> None:
        self._deepen(1)

    def unfreeze(self) -> None:
        self._deepen(-1)

    def _deepen(self, step: int) -> None:
        if ((self.depth + step) > 0) != (self.depth > 0) and (self.at.ids or self.at.fill):
            self.consume()
        self.depth += step

    @contextmanager
    def frozen(self) -> Iterator[Branch]:
        self.freeze()
        yield self
        self.unfreeze()

    def adapt(self, text: str, epochs: int, context: str) -> None:
        for _ in range(epochs):
            self.at.ids += self.vocabulary.encode(self.at.fill)
            self.at.fill = text
            if context == "keep":
                self.settle()
            else:
                self.clear_context()

    def clear_context(self) -> None:
        at = self.at
        root, number = at.root, at.number
        if at.items or at.ids or at.fill:
            self.consume()
            here = self.here()
            root, number = digest(b"c" + here.version_id), here.version
        self._leave(root, number)

    def _leave(self, root: bytes, number: int) -> None:
        kept = {"variables": self.at.variables, "logprobs": self.at.logprobs}
        self.at = Place(root, number, **kept)  # type: ignore[arg-type]

    def snapshot(self, name: str) -> None:
        self.settle()
        here = self.here()
        is_root = not self.at.items
        root = self.at.root if is_root else digest(b"c" + here.version_id)
        self.world.files[name] = (root, here.version)

    def restore(self, name: str) -> None:
        self._leave(*self.world.files[name])

    def release(self) -> None:
        self.world.branches.remove(self)


class Group:
    """The verbs of branches."""

    def __init__(self, source: Branch, states: list[Branch], pin: object | None) -> None:
        self.source, self.states, self.pin = source, states, pin
        source.world.groups.append(self)

    def __iter__(self) -> Iterator[Branch]:
        return iter(self.states)

    def __getitem__(self, i: int) -> Branch:
        return self.states[i]

    def best(self, name: str) -> Branch:
        def mean(branch: Branch) -> float:
            row = branch.at.logprobs.get(name)
            if not row:
                raise Refused("InvalidStateRequest")
            return sum(row) / len(row)

        return max(self.states, key=mean)

    def prune(self, key: Callable[[Branch], Any], keep: int) -> None:
        ranked = sorted(self.states, key=key, reverse=True)
        for branch in ranked[keep:]:
            branch.release()
        self.states = [b for b in self.states if b in ranked[:keep]]

    def join(self) -> None:
        old = dict(self.source.at.variables)
        for branch in self.states:
            for name, value in branch.at.variables.items():
                if name not in old:
                    self.source.at.variables.setdefault(name, []).append(value)
        self.release()

    def release(self) -> None:
        for branch in self.states:
            if branch in self.source.world.branches:
                branch.release()
        self.pin = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()
