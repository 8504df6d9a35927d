"""sgl-rwttt inspect: snapshot files made by hand, and a server with fixed answers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sgl_rwttt.cli import main as cli
from sgl_rwttt.cli.inspect import server_text
from sgl_rwttt.cli.tables import size, table

ID = "0123456789abcdef" * 2
ZEROS = "0" * 64
FIELDS = {
    "format": "sgl_rwttt snapshot 1",
    "layers": "1,3",
    "chunk": "2",
    "dtype": "float32",
    "rule": "in_place layers=1,3 chunk=2 lr=0.1 proj=1 target=input_embed",
    "fingerprint": "f" * 32,
    "version": "5",
    "version_id": ID,
    "state_id": "ab" * 16,
    "chain": f"b3:{'1' * 32} p4:{'2' * 32} c4:{'3' * 32} p5:{ID}",
}


def write_snapshot(path: Path, context: bool = False) -> bytes:
    """A file as docs/snapshots.md says, with bytes that count up; returns its content."""
    sections = [{"D": 2 * 3 * 4 * 4, "H": 2 * 4 * 4 * 4, "V": 2 * 4 * 3 * 4}]
    if context:
        sections += [{"tail.H": 32, "tokens": 40}, {"kv.K": 64, "kv.V": 64}]
    data = [bytes(i % 251 for i in range(sum(each.values()))) for each in sections]
    fields = {**FIELDS, "checksum": sha256(data[0]).hexdigest(), "header_checksum": ZEROS}
    if context:
        fields["format"] = "sgl_rwttt context 1"
        fields["context"] = json.dumps(
            {
                "state_id": "cd" * 16,
                "position": 5,
                "tail": 1,
                "kv": "float32 4x2x8x8",
                "checksum": sha256(data[1]).hexdigest(),
                "kv_checksum": sha256(data[2]).hexdigest(),
            }
        )
    header: dict[str, Any] = {"__metadata__": fields}
    at = 0
    for section in sections:
        for name, length in section.items():
            shape = [length // 4]
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + length]}
            at += length
    text = json.dumps(header, separators=(",", ":")).encode()
    raw = len(text).to_bytes(8, "little") + text
    sealed = sha256(raw).hexdigest().encode()
    raw = raw.replace(b'"header_checksum":"' + ZEROS.encode(), b'"header_checksum":"' + sealed)
    path.write_bytes(raw + b"".join(data))
    return path.read_bytes()


def test_a_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One has to restore a file to learn what is in it."""
    path = tmp_path / "tutor"
    write_snapshot(path)
    assert cli.main(["inspect", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"version      5 ({ID})" in lines
    assert "layers       1,3; chunk 2, float32" in lines
    assert "chain        a dense base, 2 pages, 1 reset" in lines
    assert "checksums    verified" in lines
    assert lines[-3:] == [
        "D       F32    24     96 B",
        "H       F32    32     128 B",
        "V       F32    24     96 B",
    ]
    assert cli.main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == 5
    assert found["bytes"] == path.stat().st_size
    assert (found["verified"], found["problems"], found["context"]) == (True, [], None)
    assert {name: found[name] for name in FIELDS} == FIELDS | {"version": 5}


def test_a_snapshot_with_its_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A part of the file that no checksum is compared for."""
    path = tmp_path / "chat"
    whole = write_snapshot(path, context=True)
    assert cli.main(["inspect", str(path)]) == 0
    assert (
        "context      5 tokens, 1 in the tail, KV float32 4x2x8x8\n"
        f"             state id {'cd' * 16}\n"
    ) in capsys.readouterr().out
    for back, section in ((1, "KV"), (129, "context"), (201, "version")):
        damaged = bytearray(whole)
        damaged[-back] ^= 1
        path.write_bytes(damaged)
        assert cli.main(["inspect", str(path)]) == 1
        assert f"checksums    the data of the {section} was changed\n" in capsys.readouterr().out


def test_a_file_of_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reader follows the document, and the writer something else."""
    import torch

    from sgl_rwttt.core.snapshots import Link
    from sgl_rwttt.srt_ext import snapshot_file

    chain = (Link("root", 0, b"0" * 16), Link("page", 1, b"1" * 16))
    tensors = {"H": torch.randn(2, 4, 5), "V": torch.randn(2, 4, 3)}
    layout = {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    fits = {name: FIELDS[name] for name in ("layers", "chunk", "dtype", "rule", "fingerprint")}
    fits["format"] = snapshot_file.FORMAT
    with (tmp_path / "x").open("wb") as stream:
        snapshot_file.write(stream, snapshot_file.blank_header(fits, chain, layout), tensors)
    assert cli.main(["inspect", str(tmp_path / "x")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "chain        the model's root, 1 page" in lines
    assert "checksums    verified" in lines


def test_a_damaged_snapshot_is_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cut or changed file that is reported as good."""
    path = tmp_path / "tutor"
    whole = write_snapshot(path)
    path.write_bytes(whole[:-1])
    assert cli.main(["inspect", str(path)]) == 1
    assert f"checksums    {len(whole) - 1} bytes, not {len(whole)}" in capsys.readouterr().out
    path.write_bytes(whole.replace(b'"chunk":"2"', b'"chunk":"4"'))
    assert cli.main(["inspect", str(path), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == ["the header was changed"]
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert cli.main(["inspect", str(path), "--no-verify"]) == 0
    assert "header verified, data not read" in capsys.readouterr().out


NO_SNAPSHOTS = {
    "empty": b"",
    "text": b"This is a text and no snapshot at all.",
    "huge": (1 << 60).to_bytes(8, "little") + b"{}",
    "list": (2).to_bytes(8, "little") + b"[]",
    "other": (2).to_bytes(8, "little") + b"{}",
    "fields": (56).to_bytes(8, "little")
    + b'{"__metadata__":{"format":"sgl_rwttt snapshot 1"}}      ',
}


@pytest.mark.parametrize("content", NO_SNAPSHOTS.values(), ids=NO_SNAPSHOTS)
def test_another_file_is_1(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback, or memory for a header of a petabyte."""
    path = tmp_path / "file"
    path.write_bytes(content)
    assert cli.main(["inspect", str(path)]) == 1
    assert "no snapshot" in capsys.readouterr().err


def test_a_file_needs_no_torch(tmp_path: Path) -> None:
    """Looking at 4 KB of header takes seconds of imports."""
    path = tmp_path / "tutor"
    write_snapshot(path)
    code = (
        "import sys\nfrom sgl_rwttt.cli.main import main\n"
        f"assert main(['inspect', {str(path)!r}]) == 0\n"
        "heavy = {'torch', 'transformers', 'sglang', 'numpy', 'requests'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nofile"], "nofile is no file; a URL begins with http://"),
        (["localhost:30000"], "a URL begins with http://"),
        (["."], ". is a folder"),
        ([__file__, "--owner", "x"], "--owner goes with the URL"),
    ],
)
def test_wrong_usage_is_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A typing error that looks like an empty server."""
    assert cli.main(["inspect", *words]) == 2
    assert message in capsys.readouterr().err


OWNER = {
    "name": "f6a3d549",
    "nodes": 2,
    "running": 0,
    "root_count": 0,
    "pin_count": 1,
    "referenced_bytes": 34816,
    "age_s": 12.42,
    "idle_s": 3.01,
    "timeout_s": 600.0,
}
BRANCH = {
    "rid": "d18b" * 8,
    "parent": None,
    "running": False,
    "mode": "write",
    "pin": "base",
    "next_root": None,
    "root": "466f" * 8,
    "position": 68,
    "version": 8,
    "tail": 4,
    "state_id": "85c0" * 8,
}
KEY = "secret"
ANSWERS: dict[str, tuple[int, Any]] = {
    "info": (
        200,
        {
            "model_path": "/models/toy",
            "rule": "in_place",
            "fingerprint": "f" * 8,
            "boot_id": "b00",
            "running": 0,
            "pools": {"rule": "in_place layers=1", "page_bytes": 2048, "base_bytes": 1 << 20},
            "store": {
                "pages_live": 9,
                "pages_free": 1015,
                "pages_total": 1025,
                "bases_live": 0,
                "bases_free": 8,
                "bases_total": 9,
            },
        },
    ),
    "owners": (200, {"owners": [OWNER], "count": 1, "truncated": False}),
    "snapshots": (
        200,
        {
            "snapshots": [
                {"name": "tutor", "bytes": 99, "version": 41},
                {"name": "bad", "error": {"type": "IncompatibleSnapshot", "message": "chunk: 4"}},
            ]
        },
    ),
    "owner": (
        200,
        {
            **OWNER,
            "owner": "id",
            "branches": [BRANCH, BRANCH | {"rid": "e2" * 16, "parent": "d18b" * 8, "pin": None}],
            "pins": ["base"],
            "roots": [],
            "truncated": False,
        },
    ),
}


@pytest.fixture
def url() -> Iterator[str]:
    """A server that has ANSWERS and wants KEY."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer = ANSWERS[self.path.removeprefix("/ttt/")]
            if body.get("owner", "id") != "id":
                wire = {"type": "UnknownOwner", "message": "session x does not exist"}
                status, answer = 404, {"error": wire}
            if self.headers["Authorization"] != f"Bearer {KEY}":
                status, answer = 401, {"error": "Unauthorized"}
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An operator reads JSON by eye, or sees other numbers than the server gave."""
    assert cli.main(["inspect", url, "--api-key", KEY]) == 0
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "model        /models/toy",
        "rule         in_place layers=1",
        "fingerprint  ffffffff",
        "boot id      b00",
        "running      0",
        "",
        "pool   live  free  total  each     in use",
        "pages     9  1015   1025  2.0 KiB  18.0 KiB",
        "bases     0     8      9  1.0 MiB  0 B",
        "",
        "owner     branches  running  roots  pins  bytes  idle s",
        "f6a3d549         2        0      0     1  34816    3.01",
        "",
        "snapshot  version  bytes",
        "tutor          41     99",
        "bad             -      -  chunk: 4",
    ]
    assert cli.main(["inspect", url + "/", "--api-key", KEY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {name: ANSWERS[name][1] for name in ("info", "owners", "snapshots")}


def test_a_server_of_two_ranks() -> None:
    """A full rank hides behind the sum."""
    store = ANSWERS["info"][1]["store"]
    rank = {"dp_rank": 0, "sessions": 3, "running": 1, "store": store}
    ranks = [rank, {**rank, "dp_rank": 1, "sessions": 0, "store": {**store, "pages_free": 2}}]
    told = {
        "info": {**ANSWERS["info"][1], "dp_ranks": ranks},
        "owners": {**ANSWERS["owners"][1], "owners": [{**OWNER, "dp_rank": 1}]},
        "snapshots": None,
    }
    assert server_text(told).splitlines()[-6:] == [
        "dp_rank  owners  running  pages  free  bases  free",
        "      0       3        1      9  1015      0     8",
        "      1       0        1      9     2      0     8",
        "",
        "owner     branches  running  roots  pins  bytes  idle s  dp_rank",
        "f6a3d549         2        0      0     1  34816    3.01        1",
    ]


def test_an_owner(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its branches cannot be told from each other."""
    monkeypatch.setenv("RWTTT_API_KEY", KEY)
    assert cli.main(["inspect", url, "--owner", "id"]) == 0
    title, *graph = capsys.readouterr().out.splitlines()
    assert title.startswith("owner f6a3d549: 2 requests")
    assert [line.split()[:2] for line in graph[:2]] == [["*", "e2e2e2e2"], ["*", "d18bd18b"]]
    assert cli.main(["inspect", url, "--owner", "id", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == ANSWERS["owner"][1]
    assert cli.main(["inspect", url, "--owner", "other"]) == 1
    assert "UnknownOwner: session x does not exist" in capsys.readouterr().err


def test_servers_that_do_not_answer(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback of an HTTP library; a server that keeps no snapshots cannot be looked at."""
    monkeypatch.delenv("RWTTT_API_KEY", raising=False)
    assert cli.main(["inspect", url]) == 1
    assert "wants its API key" in capsys.readouterr().err
    assert cli.main(["inspect", "http://127.0.0.1:9"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    wire = {"type": "InvalidStateRequest", "message": "this server keeps no snapshots: start it"}
    monkeypatch.setitem(ANSWERS, "snapshots", (400, {"error": wire}))
    monkeypatch.setitem(ANSWERS, "owners", (200, {"owners": [], "count": 0, "truncated": False}))
    assert cli.main(["inspect", url, "--api-key", KEY]) == 0
    assert capsys.readouterr().out.endswith("no owners\n")
    monkeypatch.setitem(ANSWERS, "info", (404, {"detail": "Not Found"}))
    assert cli.main(["inspect", url, "--api-key", KEY]) == 1
    assert "is this a server of a TTT checkpoint?" in capsys.readouterr().err


def test_tables() -> None:
    """Numbers of one column cannot be compared by eye."""
    assert table(("a", "n"), [("x", 10), ("yy", 2)]) == "a    n\nx   10\nyy   2"
    assert table(("a",), []) == "a"
    assert [size(n) for n in (0, 1023, 1024, 1 << 31)] == ["0 B", "1023 B", "1.0 KiB", "2.0 GiB"]
