"""Save and restore: what is in the file is all of the state, and anything else is refused.

Kinds of failure that users of stateful serving report: a save that left part of the state out, a
restore that gave other output or took what did not fit, a slot visible before its copy finished.
"""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sgl_rwttt.core import faults
from sgl_rwttt.core.errors import (
    IncompatibleSnapshot,
    InvalidStateRequest,
    StateCapacity,
    StateError,
    UnknownState,
)
from sgl_rwttt.core.owners import OwnerState
from sgl_rwttt.core.spans import ModeSpans
from sgl_rwttt.core.versions import Version
from sgl_rwttt.srt_ext.rules import only_form
from sgl_rwttt.srt_ext.snapshot_folder import SnapshotFolder, check_folder
from sgl_rwttt.srt_ext.snapshots import Fit, Snapshots, required_fields
from tests.backends.in_place_rig import Rig, some_tokens

C = 4
LENGTHS = [0, 1, C - 1, C, C + 1, 2 * C - 1, 3 * C, 5 * C + 1, 9 * C - 1]


class Server:
    """A rig with a snapshot folder: what one process is."""

    def __init__(self, folder: Path, max_bytes: int = 1 << 20, max_files: int = 8, **shape: Any):
        self.rig = Rig(C, **shape)
        self.folder = folder
        dtype = str(self.rig.backend.dtype).removeprefix("torch.")
        self.snapshots = Snapshots(
            SnapshotFolder(str(folder), max_bytes, max_files),
            [Fit(required_fields(self.rig.config, dtype, "rig"), self.rig.root, self.rig.backend)],
            self.rig.store,
            self.rig.backend,
            only_form,
        )

    def written(self, tokens: list[int]) -> OwnerState:
        state = self.rig.start("a")
        if tokens:
            self.rig.write(state, tokens)
        return state

    def save(self, name: str = "x", tokens: int = 5 * C + 1, replace: bool = False) -> bytes:
        state = self.written(some_tokens(tokens))
        try:
            self.snapshots.save(name, state.version, replace)
        finally:
            self.rig.store.release(state)
        return (self.folder / name).read_bytes()

    def restore(self, name: str = "x", owner: str = "new") -> bytes:
        return self.snapshots.restore(name, owner)[0].root

    def enter(self, root: bytes, owner: str = "new") -> OwnerState:
        store, spans = self.rig.store, ModeSpans()
        return store.create(owner, "cleared", store.match(root, [], spans, 0), root, [], spans)

    def books(self) -> tuple[Any, ...]:
        """Everything that a refused restore must leave as it was."""
        store = self.rig.store
        store.check_integrity()
        pools = store._pages.live, store._bases.live
        return pools, set(store._index.versions), store.stats()["roots"]

    def refuses(self, kind: type[StateError], match: str, name: str = "x") -> None:
        before = self.books()
        with pytest.raises(kind, match=match):
            self.restore(name)
        assert self.books() == before


def test_two_processes_save_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: the snapshot of an owner on another rank, written over without being asked to; and
    more files than the limit."""
    one, two = Server(tmp_path, max_files=2), Server(tmp_path, max_files=2)
    first = two.save("x")

    def meanwhile(name: str, _replace: bool) -> None:
        monkeypatch.undo()  # the other process looked before this one had written

    for name, kind in (("x", InvalidStateRequest), ("z", StateCapacity)):
        monkeypatch.setattr(one.snapshots.folder, "check_new", meanwhile)
        with pytest.raises(kind):
            one.save(name)
        assert (tmp_path / "x").read_bytes() == first
        two.save("y", replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fold_pages", [0, 1, 3])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_new_process_goes_on(
    tmp_path: Path, length: int, fold_pages: int, dtype: torch.dtype
) -> None:
    """Guards: a save that reports success but left part of the state out of the file."""
    old = Server(tmp_path, fold_pages=fold_pages, dtype=dtype)
    tokens, later = some_tokens(length), some_tokens(2 * C + 3, seed=1)
    state = old.written(tokens)
    size = old.snapshots.save("x", state.version)
    assert size == (tmp_path / "x").stat().st_size
    cleared = old.rig.store.open_root("a", state.version)
    new = Server(tmp_path, fold_pages=fold_pages, dtype=dtype)
    assert new.restore() == cleared
    same_bits(new.rig, new.rig.store.root("new", cleared), old.rig, state.version)
    ours, theirs = new.enter(cleared), old.enter(cleared, "a")
    kept = length - length % C
    expected = new.rig.expected(tokens[:kept] + later)[:, kept:]
    deltas = torch.cat([new.rig.write(ours, later[:1]), new.rig.write(ours, later[1:])], dim=1)
    if dtype is torch.float32:
        torch.testing.assert_close(deltas, expected, rtol=1e-5, atol=1e-6)
    old.rig.write(theirs, later[:1])
    assert torch.equal(deltas[:, 1:], old.rig.write(theirs, later[1:]))
    assert ours.clock.state_id == theirs.clock.state_id
    assert ours.version.number == theirs.version.number == length // C + 2
    new.rig.store.release(ours)
    new.rig.store.release_owner("new")
    new.rig.store.flush()
    assert new.books()[0] == (0, 0)


def same_bits(rig: Rig, version: Version, other: Rig, saved: Version) -> None:
    ours, theirs = rig.backend.export(version), other.backend.export(saved)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name])


def test_the_file_is_plain_safetensors(tmp_path: Path) -> None:
    """Guards: a format of our own behind a borrowed name."""
    server = Server(tmp_path, fold_pages=3)
    state = server.written(some_tokens(5 * C + 1))
    server.snapshots.save("x", state.version)
    found = load_file(tmp_path / "x")
    for name, tensor in server.rig.backend.export(state.version).items():
        assert torch.equal(found.pop(name), tensor)
    assert not found
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    server.snapshots.save("empty", server.rig.store.root("a", server.rig.root))
    assert load_file(tmp_path / "empty") == {}


def test_a_retained_version_is_not_loaded_again(tmp_path: Path) -> None:
    """Guards: a second copy of a state in the server that saved it."""
    server = Server(tmp_path)
    state = server.written(some_tokens(5 * C))
    server.snapshots.save("x", state.version)
    live = server.books()[0]
    restored, _ = server.snapshots.restore("x", "new")
    assert restored.reused
    assert server.books()[0] == live
    assert server.rig.store.root("new", restored.root).pages == state.version.pages


# What does not fit


def parsed(data: bytes) -> tuple[dict[str, Any], bytes]:
    """(header, data section) of a file."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def sealed(header: dict[str, Any], body: bytes) -> bytes:
    """A file whose header checksum is right, by the format's description."""
    header["__metadata__"]["header_checksum"] = "0" * 64
    text = json.dumps(header, separators=(",", ":")).encode()
    raw = len(text).to_bytes(8, "little") + text
    digest = sha256(raw).hexdigest()
    return (
        raw.replace(b'"header_checksum":"' + b"0" * 64, f'"header_checksum":"{digest}'.encode())
        + body
    )


FORGED = {
    "format": "sgl_rwttt snapshot 2",
    "layers": "0,2",
    "chunk": "8",
    "dtype": "bfloat16",
    "rule": "in_place of another kind",
    "fingerprint": "other",
    "version": "7",
    "version_id": "00" * 16,
    "state_id": "00" * 16,
    "chain": "r0:" + "00" * 16,
    "checksum": "00" * 32,
}


@pytest.mark.parametrize("field", FORGED)
def test_each_header_field_counts(tmp_path: Path, field: str) -> None:
    """Guards: a state of another model, rule or place taken for one of ours."""
    header, body = parsed(Server(tmp_path, fold_pages=3).save())
    header["__metadata__"][field] = FORGED[field]
    (tmp_path / "x").write_bytes(sealed(header, body))
    Server(tmp_path, fold_pages=3).refuses(IncompatibleSnapshot, f"^{field}: ")


def _shape(header: dict[str, Any]) -> None:
    header["H"]["shape"][0] = 3


def _huge(header: dict[str, Any]) -> None:
    header["H"]["shape"][1] = 1 << 60


def _dtype(header: dict[str, Any]) -> None:
    header["V"]["dtype"] = "F16"


def _offsets(header: dict[str, Any]) -> None:
    header["V"]["data_offsets"] = header["H"]["data_offsets"]


def _missing(header: dict[str, Any]) -> None:
    del header["V"]


def _more(header: dict[str, Any]) -> None:
    header["W"] = header["V"]


@pytest.mark.parametrize("change", [_shape, _huge, _dtype, _offsets, _missing, _more])
def test_tensors_must_be_those_of_the_model(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """Guards: memory taken, or read, as a file's header says."""
    header, body = parsed(Server(tmp_path, fold_pages=3).save())
    change(header)
    (tmp_path / "x").write_bytes(sealed(header, body))
    Server(tmp_path, fold_pages=3).refuses(IncompatibleSnapshot, "^shapes: ")


def _no_fields(header: dict[str, Any]) -> None:
    del header["__metadata__"]


def _field_left_out(header: dict[str, Any]) -> None:
    del header["__metadata__"]["rule"]


def _field_too_many(header: dict[str, Any]) -> None:
    header["__metadata__"]["pickle"] = "gASVAAAAAAA="


def _no_text(header: dict[str, Any]) -> None:
    header["__metadata__"]["version"] = 5


@pytest.mark.parametrize("change", [_no_fields, _field_left_out, _field_too_many, _no_text])
def test_a_header_has_its_fields(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Guards: a missing field taken for a match."""
    header, body = parsed(Server(tmp_path).save())
    change(header)
    text = json.dumps(header).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + body)
    Server(tmp_path).refuses(IncompatibleSnapshot, "^header: ")


@pytest.mark.parametrize("text", [b"[]", b"{", b"\xff" * 8, b"[" * 100_000, b'{"__metadata__":1}'])
def test_what_is_no_header(tmp_path: Path, text: bytes) -> None:
    """Guards: a crash of the server on bytes that anybody can put into the folder."""
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text)
    Server(tmp_path).refuses(IncompatibleSnapshot, "^header: ")


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 20, 5 << 20])
def test_the_length_of_the_header_is_checked(tmp_path: Path, length: int) -> None:
    """Guards: a read, or an allocation, as long as eight bytes of the file say."""
    data = Server(tmp_path).save()
    (tmp_path / "x").write_bytes(length.to_bytes(8, "little") + data[8:])
    Server(tmp_path).refuses(IncompatibleSnapshot, "^length: ")


@pytest.mark.parametrize(
    "field, shape",
    [
        ("layers", {"layers": 3}),
        ("rule", {"lr": 0.06}),
        ("rule", {"proj": False}),
        ("dtype", {"dtype": torch.bfloat16}),
        ("shapes", {"d_model": 16}),
        ("shapes", {"d_ff": 16}),
    ],
)
def test_another_model(tmp_path: Path, field: str, shape: dict[str, Any]) -> None:
    """Guards: a restore into a server whose numbers mean something else."""
    Server(tmp_path, fold_pages=3).save()
    Server(tmp_path, fold_pages=3, **shape).refuses(IncompatibleSnapshot, f"^{field}: ")


def test_truncated_at_any_offset(tmp_path: Path) -> None:
    """Guards: the missing end of a file read as zeros, or as another state's memory."""
    data = Server(tmp_path, fold_pages=3).save()
    header = 8 + int.from_bytes(data[:8], "little")
    chosen = random.Random(0).sample(range(len(data)), 20)
    server = Server(tmp_path, fold_pages=3)
    for end in (0, 1, 7, 8, 9, header - 1, header, header + 1, len(data) - 1, *chosen):
        (tmp_path / "x").write_bytes(data[:end])
        server.refuses(IncompatibleSnapshot, "^length: ")
    (tmp_path / "x").write_bytes(data + b"\0")
    server.refuses(IncompatibleSnapshot, "^length: ")


def test_one_byte_changed_anywhere(tmp_path: Path) -> None:
    """Guards: a damaged file restored; every byte of the header and a sample of the data."""
    data = Server(tmp_path, fold_pages=3).save()
    header = 8 + int.from_bytes(data[:8], "little")
    dice = random.Random(0)
    body = dice.sample(range(header, len(data)), 100)
    server, named = Server(tmp_path, fold_pages=3), set()
    for at in (*range(header), *body):
        changed = bytearray(data)
        changed[at] ^= 1 << dice.randrange(8)
        (tmp_path / "x").write_bytes(changed)
        with pytest.raises(IncompatibleSnapshot) as caught:
            server.restore()
        named.add(str(caught.value).partition(":")[0])
    assert server.books()[0] == (0, 0)
    assert {"header", "length", "checksum", "header_checksum", "rule", "chain"} <= named
    (tmp_path / "x").write_bytes(data)
    server.restore()


@pytest.mark.parametrize("name", ["D", "H", "V"])
def test_not_finite_with_good_checksums(tmp_path: Path, name: str) -> None:
    """Guards: NaN or infinity brought into the pools by a file."""
    header, body = parsed(Server(tmp_path, fold_pages=3).save())
    first, _ = header[name]["data_offsets"]
    for value in (float("nan"), float("-inf")):
        number = torch.tensor([value]).numpy().tobytes()
        spoiled = body[: first + 8] + number + body[first + 12 :]
        header["__metadata__"]["checksum"] = sha256(spoiled).hexdigest()
        (tmp_path / "x").write_bytes(sealed(header, spoiled))
        Server(tmp_path, fold_pages=3).refuses(IncompatibleSnapshot, f"^{name}: .*not finite")


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    """Guards: success reported for a file that no server would take."""
    server = Server(tmp_path, fold_pages=3)
    state = server.written(some_tokens(3 * C))
    server.rig.backend.D[1, state.version.base, 0, 0] = torch.inf
    with pytest.raises(IncompatibleSnapshot, match=r"^D: .*not finite"):
        server.snapshots.save("x", state.version)
    assert os.listdir(tmp_path) == []


# Failures on the way


@pytest.mark.parametrize("point", ["publish.allocated", "publish.copied"])
def test_failure_between_slots_and_publication(tmp_path: Path, point: str) -> None:
    """Guards: a version visible before its copy finished, or a slot lost with it."""
    data = Server(tmp_path, fold_pages=3).save()
    server = Server(tmp_path, fold_pages=3)
    with faults.armed(point, faults.raising(RuntimeError("device lost"))):
        server.refuses(StateError, "device lost")
    assert torch.isnan(server.rig.backend.H).all()
    assert (tmp_path / "x").read_bytes() == data
    server.restore()


def test_half_a_copy_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a slot that keeps half of a state after a failed copy."""
    Server(tmp_path, fold_pages=3).save()
    server = Server(tmp_path, fold_pages=3)
    restore = server.rig.backend.restore

    def half(tensors: dict[str, Tensor], base: int | None, pages: tuple[int, ...]) -> None:
        restore(tensors, base, pages[1:])
        raise RuntimeError("device lost")

    monkeypatch.setattr(server.rig.backend, "restore", half)
    server.refuses(StateError, "device lost")
    assert torch.isnan(server.rig.backend.H).all()
    assert torch.isnan(server.rig.backend.D).all()


@pytest.mark.parametrize("limit", [0, 8, 900, 3000])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, code: int
) -> None:
    """Guards: half a file under a good name, or the old file lost with the new one."""
    server = Server(tmp_path, fold_pages=3)
    old = server.save("old", 3 * C)

    class Full:
        """A file on a disk with `limit` bytes left."""

        def __init__(self, file: Any) -> None:
            self.file, self.left = file, limit

        def write(self, part: Any) -> None:
            self.file.write(bytes(part)[: self.left])
            self.left -= len(bytes(part))
            if self.left < 0:
                raise OSError(code, os.strerror(code))

    create = server.snapshots.folder.create
    monkeypatch.setattr(
        server.snapshots.folder,
        "create",
        lambda name, write, **how: create(name, lambda file: write(Full(file)), **how),
    )
    kind = StateCapacity if code == errno.ENOSPC else StateError
    for name in ("x", "old"):
        with pytest.raises(kind, match=f"cannot write snapshot '{name}'") as caught:
            server.save(name, 5 * C, replace=True)
        assert type(caught.value) is kind
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_bytes() == old


def test_what_a_killed_process_left_is_no_snapshot(tmp_path: Path) -> None:
    """Guards: half a file listed or counted, and a folder that fills up with them."""
    left, young = tmp_path / f".{'0' * 16}.tmp", tmp_path / f".{'1' * 16}.tmp"
    mine = tmp_path / ".mine.tmp"
    for path in (left, young, mine):
        path.write_bytes(b"half")
    for path in (left, mine):
        os.utime(path, (time.time() - 7200,) * 2)
    server = Server(tmp_path, max_files=1)
    assert sorted(os.listdir(tmp_path)) == sorted([young.name, mine.name])
    assert server.snapshots.listing()["snapshots"] == []
    server.save()


# Names, links and limits


BAD_NAMES = [
    "",
    ".",
    "..",
    ".hidden",
    "../x",
    "a/b",
    "/etc/passwd",
    "a\\b",
    "a\0b",
    "x\n",
    "a b",
    "ü",
    "%2e%2e",
    "x" * 129,
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_are_plain(tmp_path: Path, name: str) -> None:
    """Guards: a client that reads or writes outside of the folder."""
    inside = tmp_path / "folder"
    inside.mkdir()
    server = Server(inside)
    state = server.written(some_tokens(C))
    with pytest.raises(InvalidStateRequest, match="a snapshot's name"):
        server.snapshots.save(name, state.version)
    server.refuses(InvalidStateRequest, "a snapshot's name", name)
    assert [str(p) for p in tmp_path.rglob("*")] == [str(inside)]


@pytest.mark.parametrize("name", ["x", "-", "_", "0", "A.b-c_9..", "x" * 128])
def test_plain_names_are_taken(tmp_path: Path, name: str) -> None:
    """Guards: a guard that refuses what it should not."""
    server = Server(tmp_path)
    server.save(name)
    server.restore(name)
    assert [s["name"] for s in server.snapshots.listing()["snapshots"]] == [name]


def test_links_and_other_files_are_not_followed(tmp_path: Path) -> None:
    """Guards: a link in the folder that leads a read or a write out of it."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.mkdir()
    Server(outside).save("x")
    secret = (outside / "x").read_bytes()
    server = Server(inside)
    (inside / "link").symlink_to(outside / "x")
    (inside / "dangling").symlink_to(outside / "nothing")
    (inside / "folder").mkdir()
    os.mkfifo(inside / "pipe")
    for name in ("link", "dangling", "folder", "pipe"):
        server.refuses(InvalidStateRequest, name, name)
        with pytest.raises(InvalidStateRequest, match="not a regular file"):
            server.save(name, replace=True)
    assert server.snapshots.listing()["snapshots"] == []
    assert (outside / "x").read_bytes() == secret
    assert not (outside / "nothing").exists()
    server.refuses(UnknownState, "no snapshot 'y'", "y")


def test_a_name_is_given_once(tmp_path: Path) -> None:
    """Guards: a snapshot lost to another one of the same name."""
    server = Server(tmp_path)
    old = server.save("x", 3 * C)
    with pytest.raises(InvalidStateRequest, match="replace"):
        server.save("x", 5 * C)
    assert (tmp_path / "x").read_bytes() == old
    assert server.save("x", 5 * C, replace=True) != old


def test_limits_name_their_flags(tmp_path: Path) -> None:
    """Guards: a client that fills the disk, or has the server read a file of any size."""
    server = Server(tmp_path, max_files=2)
    server.save("a")
    size = len(server.save("b"))
    with pytest.raises(StateCapacity, match=r"2 snapshots.*--ttt-max-snapshots"):
        server.save("c")
    server.save("b", replace=True)
    small = Server(tmp_path, max_bytes=size - 1, max_files=9)
    small.refuses(StateCapacity, f"{size} bytes.*--ttt-snapshot-mb", "b")
    with pytest.raises(StateCapacity, match=f"{size} bytes.*--ttt-snapshot-mb"):
        small.save("c")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    Server(tmp_path, max_bytes=size, max_files=9).restore("b")


def test_the_folder_is_checked_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a server that starts and fails at the first save."""
    file = tmp_path / "file"
    file.touch()
    for folder in (tmp_path / "missing", file):
        with pytest.raises(ValueError, match=r"--ttt-snapshot-dir=.* no such folder"):
            check_folder(str(folder))
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(ValueError, match=r"--ttt-snapshot-dir=.* cannot be read and written"):
        check_folder(str(tmp_path))


def test_the_listing_says_what_fits(tmp_path: Path) -> None:
    """Guards: one bad file that hides the good ones."""
    server = Server(tmp_path)
    size = len(server.save("good", 5 * C + 1))
    (tmp_path / "bad").write_bytes(b"nonsense")
    found = {entry["name"]: entry for entry in server.snapshots.listing()["snapshots"]}
    assert found["good"]["version"] == 5
    assert found["good"]["bytes"] == size
    assert found["bad"]["error"]["type"] == "IncompatibleSnapshot"
