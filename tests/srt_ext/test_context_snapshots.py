"""Files of a context: state, tail, tokens and KV come back together, or nothing changes.

The store, the backend, SGLang's KV pool and its allocator are real; the radix tree is a list.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from torch import Tensor

from sgl_rwttt.core import faults
from sgl_rwttt.core.chain import ContextChain
from sgl_rwttt.core.effects import Effect
from sgl_rwttt.core.errors import IncompatibleSnapshot, StateCapacity, StateError
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.srt_ext.context_snapshots import ContextSnapshots, RestoredContext
from sgl_rwttt.srt_ext.kv_rows import KVRows
from sgl_rwttt.srt_ext.lineage import mode_keys, namespace
from sgl_rwttt.srt_ext.rules import only_form
from sgl_rwttt.srt_ext.runtime import TTTRuntime
from sgl_rwttt.srt_ext.snapshot_folder import SnapshotFolder
from sgl_rwttt.srt_ext.snapshots import Fit, required_fields
from tests.backends.in_place_rig import VOCAB, Rig, some_tokens

C = 4
LENGTHS = [1, C, C + 1, 5 * C + 2]


class Tree:
    """Whole keys with their KV slots; the interface of the radix cache that a restore uses."""

    page_size = 1

    def __init__(self, tokens: int, heads: int) -> None:
        pool = MHATokenToKVPool(tokens, 1, torch.float32, heads, 3, 2, "cpu", False)
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(
            tokens, torch.float32, "cpu", pool, need_sort=False
        )
        self.held: list[tuple[list[Any], Tensor]] = []
        self.locks = 0

    def find(self, key: RadixKey) -> tuple[Tensor, int]:
        best = torch.empty(0, dtype=torch.int64)
        for known, slots in self.held:
            same = [a == b for a, b in zip(known, self.items(key), strict=False)]
            shared = same.index(False) if False in same else len(same)
            best = slots[:shared] if shared > len(best) else best
        return best, len(best)

    def items(self, key: RadixKey) -> list[Any]:
        return [(key.extra_key, token) for token in key.token_ids]

    def hold(self, key: RadixKey, slots: Tensor, known: int) -> None:
        assert torch.equal(slots[:known], self.find(key)[0])
        self.held.append((self.items(key), slots))

    def lock(self, node: int) -> int:
        self.locks += 1
        return node

    def unlock(self, lock: int) -> None:
        self.locks -= 1

    def supports_prefix_sharing(self) -> bool:
        return True

    def evict_for_alloc(self, params: Any) -> None:
        """Everything is locked."""


class Server:
    """What one process is."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int = 1 << 20,
        kv_tokens: int = 100,
        heads: int = 2,
        **shape: Any,
    ) -> None:
        self.rig = Rig(C, **shape)
        self.folder = folder
        self.tree = Tree(kv_tokens, heads)
        self.kv = KVRows(self.tree)
        self.snapshots = ContextSnapshots(
            SnapshotFolder(str(folder), max_bytes, 8),
            [
                Fit(
                    required_fields(self.rig.config, "float32", "rig"),
                    self.rig.root,
                    self.rig.backend,
                )
            ],
            self.rig.store,
            self.rig.backend,
            only_form,
        )

    def key_of(self, root: bytes, tokens: Any, modes: ModeSpans) -> RadixKey:
        return RadixKey(mode_keys(array("q", tokens), modes), namespace(None, root, self.rig.root))

    def write(self, root: bytes, tokens: list[int], modes: ModeSpans) -> None:
        """A finished request: its state is a memo, its KV in the tree."""
        store = self.rig.store
        match = store.match(root, [], ModeSpans(), 0)
        state = store.create("a", "b", match, root, [], ModeSpans())
        self.rig.forward([(state, tokens, modes)])
        store.release(state)
        slots = self.tree.token_to_kv_pool_allocator.alloc(len(tokens))
        pool = self.tree.token_to_kv_pool_allocator.get_kvcache()
        for rows in (*pool.k_buffer, *pool.v_buffer):
            rows[slots] = torch.randn(len(tokens), *rows.shape[1:])
        self.tree.hold(self.key_of(root, tokens, modes), slots, 0)

    def save(
        self,
        tokens: list[int],
        modes: ModeSpans,
        root: bytes | None = None,
        spoil: Callable[[MHATokenToKVPool], object] = lambda pool: None,
    ) -> dict[str, Tensor]:
        """Write, save as "x"; the KV that was saved."""
        root = self.rig.root if root is None else root
        self.write(root, tokens, modes)
        spoil(self.tree.token_to_kv_pool_allocator.get_kvcache())
        start = self.rig.store.root("a", root)
        chain = ContextChain(root, C, start.number)
        chain.sync(tokens, modes)
        state = self.rig.store.contexts.at("a", chain, len(tokens))
        slots = self.kv.find(self.key_of(root, tokens, modes))
        args = (state, tokens, modes, self.kv, slots, '{"text":"x"}')
        size = self.snapshots.save_context("x", *args)
        assert size == (self.folder / "x").stat().st_size
        return self.kv.export(slots)

    def restore(self, most: int = 80, vocabulary: int = VOCAB) -> RestoredContext:
        limits = (most, vocabulary)
        return self.snapshots.restore_context("x", "new", "p", limits, self.kv, self.key_of)

    def books(self) -> tuple[Any, ...]:
        """Everything that a refused restore must leave as it was."""
        store = self.rig.store
        store.check_integrity()
        pools = store._pages.live, store._bases.live
        kv = self.tree.token_to_kv_pool_allocator.available_size(), len(self.tree.held)
        assert self.tree.locks == 0
        stats = store.stats()
        return pools, set(store._index.versions), stats["roots"], stats["pins"], kv

    def refuses(self, kind: type[StateError], match: str, **limits: int) -> None:
        before = self.books()
        with pytest.raises(kind, match=match):
            self.restore(**limits)
        assert self.books() == before


def modes_of(count: int) -> ModeSpans:
    """Read and write mode in turns."""
    modes = ModeSpans()
    for i in range(count):
        modes.append(1, Effect.READ if i % 5 == 3 else Effect.WRITE)
    return modes


def cleared(server: Server, count: int) -> bytes:
    """The root of a context that was cleared after `count` tokens."""
    state = server.rig.start("a")
    server.rig.write(state, some_tokens(count, seed=3))
    root = server.rig.store.open_root("a", state.version)
    server.rig.store.release(state)
    return root


@pytest.mark.parametrize("fold_pages", [0, 1, 3])
@pytest.mark.parametrize("before", [0, 3 * C + 1])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_new_process_goes_on(tmp_path: Path, length: int, before: int, fold_pages: int) -> None:
    """Guards: a part of the context that is not in the file, or does not come back."""
    old = Server(tmp_path, fold_pages=fold_pages)
    root = cleared(old, before) if before else old.rig.root
    tokens, modes = some_tokens(length), modes_of(length)
    kv = old.save(tokens, modes, root)
    new = Server(tmp_path, fold_pages=fold_pages)
    found = new.restore()
    assert (list(found.tokens), found.context.modes, found.context.client) == (
        tokens,
        modes,
        '{"text":"x"}',
    )
    assert found.kv_loaded == length
    slots = new.kv.find(new.key_of(root, tokens, modes))
    for name, tensor in new.kv.export(slots).items():
        assert torch.equal(tensor, kv[name])
    later, spans = some_tokens(2 * C + 3, seed=1), modes_of(length)
    spans.append(len(later), Effect.WRITE)
    match = new.rig.store.match(root, tokens, modes, length)
    assert match.depth == length
    exported = [
        {**s.rig.backend.export(m.version), **s.rig.backend.export_tail(m.tail.tail.page, m.rows)}
        if m.tail
        else s.rig.backend.export(m.version)
        for s, m in ((new, match), (old, old.rig.store.match(root, tokens, modes, length)))
    ]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(each, exported[1][name]) for name, each in exported[0].items())
    deltas = []
    for server, owner in ((new, "new"), (old, "a")):
        store = server.rig.store
        again = store.match(root, tokens, modes, length)
        state = store.create(owner, "next", again, root, tokens, modes)
        deltas.append(server.rig.forward([(state, later, spans)])[0])
        store.release(state)
    torch.testing.assert_close(deltas[0], deltas[1], rtol=1e-5, atol=1e-6)  # pages lie otherwise
    new.rig.store.release_owner("new")
    new.rig.store.flush()
    assert new.books()[0] == (0, 0)


def test_what_is_there_is_not_loaded_again(tmp_path: Path) -> None:
    """Guards: KV or state twice in memory, or a shared prefix that is taken from its owner."""
    server = Server(tmp_path)
    tokens, modes = some_tokens(5 * C), modes_of(5 * C)
    server.save(tokens, modes)
    before = server.books()
    found = server.restore()
    assert (found.kv_loaded, found.resumed.pages) == (0, 0)
    assert server.books()[:3] == before[:3]
    other = Server(tmp_path)
    other.write(other.rig.root, tokens[: 2 * C + 1], modes.slice(2 * C + 1))
    free = other.books()[-1][0]
    found = other.restore()
    assert found.kv_loaded == 3 * C - 1
    assert other.books()[-1][0] == free - found.kv_loaded


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    """Guards: a format of our own behind a borrowed name."""
    server = Server(tmp_path, fold_pages=2)
    root = cleared(server, 3 * C)
    kv = server.save(some_tokens(6 * C + 1), ModeSpans(6 * C + 1), root)
    found = load_file(tmp_path / "x")
    names = [
        "D",
        "H",
        "V",
        "root.D",
        "root.H",
        "root.V",
        "tail.H",
        "tail.T",
        "tokens",
        "kv.K",
        "kv.V",
    ]
    assert set(found) == set(names)
    assert torch.equal(found["kv.K"], kv["kv.K"])
    assert found["tokens"].tolist() == some_tokens(6 * C + 1)


def test_the_weights_alone(tmp_path: Path) -> None:
    """Guards: a file with a context that gives no weights to a server with other KV."""
    old = Server(tmp_path)
    old.save(some_tokens(5 * C + 1), ModeSpans(5 * C + 1))
    new = Server(tmp_path, heads=5)
    assert new.snapshots.has_context("x")
    new.refuses(IncompatibleSnapshot, "^kv: ")
    restored, _ = new.snapshots.restore("x", "new")
    assert restored.version.number == 5
    (listed,) = new.snapshots.listing()["snapshots"]
    assert (listed["position"], listed["version"]) == (5 * C + 1, 5)


def test_a_file_of_weights_has_no_context(tmp_path: Path) -> None:
    """Guards: an empty context where the caller asked for his own."""
    server = Server(tmp_path)
    state = server.rig.start("a")
    server.snapshots.save("x", state.version)
    assert not server.snapshots.has_context("x")
    server.refuses(IncompatibleSnapshot, "^context: ")


# What does not fit


def parsed(data: bytes) -> tuple[dict[str, Any], bytes]:
    """(header, data section) of a file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the context's fields in a file whose header checksum is right again."""
    header, body = parsed(path.read_bytes())
    context = json.loads(header["__metadata__"]["context"])
    change(context)
    header["__metadata__"] |= {"context": json.dumps(context), "header_checksum": "0" * 64}
    text = json.dumps(header, separators=(",", ":")).encode()
    raw = len(text).to_bytes(8, "little") + text
    seal = f'"header_checksum":"{sha256(raw).hexdigest()}'.encode()
    path.write_bytes(raw.replace(b'"header_checksum":"' + b"0" * 64, seal) + body)


FORGED: dict[str, tuple[str, Any]] = {
    "state_id": ("context", "00" * 16),
    "position": ("context", 7),
    "tail": ("shapes", 3),
    "modes": ("chain", "r22"),
    "modes that are none": ("context", "w5 x17"),
    "root": ("chain", "r0:" + "00" * 16),
    "root that is none": ("chain", "?"),
    "kv": ("shapes", "float32 9x2x3x3"),
    "kv that is none": ("context", "int4 2x2x3x3"),
    "client": ("context", 5),
    "checksum": ("checksum", "00" * 32),
    "kv_checksum": ("checksum", "00" * 32),
}


@pytest.mark.parametrize("field", FORGED)
def test_each_field_of_a_context_counts(tmp_path: Path, field: str) -> None:
    """Guards: tokens, modes or KV of another context under this one's state."""
    Server(tmp_path).save(some_tokens(5 * C + 2), ModeSpans(5 * C + 2))
    named, value = FORGED[field]
    forge(tmp_path / "x", lambda context: context.update({field.partition(" ")[0]: value}))
    Server(tmp_path).refuses(IncompatibleSnapshot, f"^{named}: ")


def test_a_context_has_its_fields(tmp_path: Path) -> None:
    """Guards: a missing field taken for a match."""
    Server(tmp_path).save(some_tokens(6), ModeSpans(6))
    forge(tmp_path / "x", lambda context: context.pop("modes"))
    Server(tmp_path).refuses(IncompatibleSnapshot, "^context: ")


def test_what_this_server_does_not_take(tmp_path: Path) -> None:
    """Guards: a context longer than the server's, or with tokens that it does not have."""
    Server(tmp_path).save(some_tokens(20), ModeSpans(20))
    server = Server(tmp_path)
    server.refuses(IncompatibleSnapshot, "^position: ", most=19)
    server.refuses(IncompatibleSnapshot, "^tokens: ", vocabulary=max(some_tokens(20)))
    server.restore(most=20)


def test_truncated_or_changed_anywhere(tmp_path: Path) -> None:
    """Guards: a damaged file restored; a sample of its header and of its data."""
    Server(tmp_path, fold_pages=2).save(some_tokens(5 * C + 2), modes_of(5 * C + 2))
    data = (tmp_path / "x").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    dice = random.Random(0)
    server = Server(tmp_path, fold_pages=2)
    before = server.books()
    for end in (0, 7, 8, header - 1, header, len(data) - 1, *dice.sample(range(len(data)), 20)):
        (tmp_path / "x").write_bytes(data[:end])
        server.refuses(IncompatibleSnapshot, "^length: ")
    body = dice.sample(range(header, len(data)), 100)
    for at in (*range(8), *dice.sample(range(header), 200), *body):
        damaged = bytearray(data)
        damaged[at] ^= 1 << dice.randrange(8)
        (tmp_path / "x").write_bytes(damaged)
        with pytest.raises(IncompatibleSnapshot):
            server.restore()
    assert server.books() == before
    (tmp_path / "x").write_bytes(data)
    server.restore()


@pytest.mark.parametrize("point", ["publish.allocated", "publish.copied"])
@pytest.mark.parametrize("skip", [0, 1, 2], ids=["kv", "root", "head"])
def test_a_failing_restore_changes_nothing(tmp_path: Path, point: str, skip: int) -> None:
    """Guards: KV slots, a root or a version that leak when a later part fails."""
    old = Server(tmp_path)
    old.save(some_tokens(5 * C + 2), modes_of(5 * C + 2), cleared(old, 2 * C + 1))
    new = Server(tmp_path)
    with faults.armed(point, faults.raising(RuntimeError("gone")), skip=skip) as fault:
        new.refuses(StateError, "was not restored: gone")
    assert fault.hits == 1
    assert new.restore().kv_loaded == 5 * C + 2


def test_limits_have_names(tmp_path: Path) -> None:
    """Guards: a file over --ttt-snapshot-mb, or KV taken from running requests."""
    tokens, modes = some_tokens(5 * C + 2), ModeSpans(5 * C + 2)
    small = Server(tmp_path, max_bytes=4096)
    with pytest.raises(StateCapacity, match="--ttt-snapshot-mb"):
        small.save(tokens, modes)
    assert not list(tmp_path.iterdir())
    Server(tmp_path).save(tokens, modes)
    small.refuses(StateCapacity, "--ttt-snapshot-mb")
    Server(tmp_path, kv_tokens=len(tokens) - 1).refuses(StateCapacity, "--max-total-tokens")
    Server(tmp_path, pages=5).refuses(StateCapacity, "delta|pages")


def test_a_restored_lineage_keeps_as_many_versions_as_a_running_one(tmp_path: Path) -> None:
    """Guards: --ttt-retained-versions exceeded by a restore."""
    Server(tmp_path).save(some_tokens(5 * C + 2), ModeSpans(5 * C + 2))
    server = Server(tmp_path)
    context = server.restore().point.context
    runtime: Any = SimpleNamespace(retained=2, store=server.rig.store)
    lineage: Any = SimpleNamespace(chain=context)
    TTTRuntime.expire_older(runtime, lineage, 5 * C + 2)
    versions = server.rig.store._index.versions
    expired = [versions[context.version_id(i)].expired for i in range(1, 6)]
    assert expired == [True, True, True, False, False]


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """Guards: KV that makes every later token NaN."""

    def spoil(pool: MHATokenToKVPool) -> None:
        pool.k_buffer[1][2, 0, 0] = torch.nan

    with pytest.raises(IncompatibleSnapshot, match=r"^kv\.K: "):
        Server(tmp_path).save(some_tokens(6), ModeSpans(6), spoil=spoil)
    assert not list(tmp_path.iterdir())
