"""sgl-rwttt run, on the fake server: programs, arguments, batches, exit statuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sgl_rwttt
from sgl_rwttt.cli import main as cli
from sgl_rwttt.cli import run
from sgl_rwttt.cli.rows import in_order
from sgl_rwttt.core.errors import StateCapacity
from sgl_rwttt.lang import StateBackend
from tests.lang.fake_transport import FakeServer, FakeTransport

pytestmark = pytest.mark.timeout(120)

PROGRAMS = '''
"""Programs under test."""
from helper import SUFFIX
from sgl_rwttt import assistant, function, gen, user

@function
def ask(s, q, n=1, fails=False):
    """Asks."""
    s += user(str(q) + SUFFIX)
    for i in range(n):
        s += assistant(gen(f"a{i}", max_tokens=3))
    if fails:
        raise ValueError("as asked")
    return [q, n]

@function
def odd(s, temperature=1):
    s += "x"
    s["odd"] = {1, 2}
    return object

not_a_program = 3
'''


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def call(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command in a folder with prog.py, on the fake server."""
    (tmp_path / "prog.py").write_text(PROGRAMS)
    (tmp_path / "helper.py").write_text("SUFFIX = '?'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(run, "_backend", lambda _options: StateBackend(FakeTransport(server)))
    return lambda *words: cli.main(["run", *words])


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_run_prints_the_text(
    call: Callable[..., int], server: FakeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """The answer is lost among progress and log lines, or the owner stays open."""
    server.say("Yes", "No")
    assert call("prog.py:ask", "--arg", 'q=["a", 1]', "--arg", "n=2", "--temperature", "0") == 0
    out, err = capfd.readouterr()
    assert "user\n['a', 1]?<|im_end|>" in out
    assert out.endswith("result: [['a', 1], 2]\n")
    assert err.startswith("state: version ")
    asked = [args for op, args in server.log if op == "generate"]
    assert {args["sampling_params"]["temperature"] for args in asked} == {0}
    assert not server.sessions


def test_json_and_what_is_no_json(
    call: Callable[..., int], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A program that returns an object ends in a traceback of json, after all its work."""
    assert call("prog.py:odd", "--json") == 0
    row = json.loads(capfd.readouterr().out)
    assert row["ok"] is True
    assert (row["result"], row["result_is"]) == ("<class 'object'>", "repr of type")
    assert row["variables"] == {"odd": "{1, 2}"}
    assert row["text"] == "x"
    assert set(row["state"]) == {"version", "position", "state_id"}
    assert call("prog.py:odd", "--out", "one.jsonl", "--quiet") == 0
    assert capfd.readouterr().out == "x\nresult: <class 'object'> (repr of type)\n"
    assert lines_of(tmp_path / "one.jsonl")[0]["result"] == "<class 'object'>"


def test_stream(
    call: Callable[..., int], server: FakeServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing is seen before the end, the end is missing, or a failure looks like an end."""
    server.say("The model reads")
    assert call("prog.py:ask", "--arg", "q=Q", "--stream", "--quiet") == 0
    out = capfd.readouterr().out
    assert "Q?<|im_end|>\n<|im_start|>assistant\nThe model reads<|im_end|>" in out
    assert out.endswith("\nresult: ['Q', 1]\n")
    assert call("prog.py:ask", "--arg", "q=Q", "--arg", "fails=true", "--stream") == 1
    assert "raised ValueError: as asked (prog.py, line 13)" in capfd.readouterr().err


def test_a_program_that_raises_is_1(
    call: Callable[..., int],
    server: FakeServer,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """A script goes on with the answer of a program that failed."""
    assert call("prog.py:ask", "--arg", "q=Q", "--arg", "fails=true", "--out", "o.jsonl") == 1
    message = "sgl-rwttt: prog.py:ask raised ValueError: as asked (prog.py, line 13)\n"
    assert capfd.readouterr().err == message
    assert lines_of(tmp_path / "o.jsonl") == [
        {"ok": False, "error": {"type": "ValueError", "message": "as asked"}}
    ]
    server.failures.append(StateCapacity("no pages"))
    assert call("prog.py:ask", "--arg", "q=Q") == 1
    assert "raised StateCapacity: no pages" in capfd.readouterr().err


def test_batch(call: Callable[..., int], capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Rows in another order, one failure that takes the others along, or a status of 0 for it."""
    rows = [{"q": f"{i} é", "fails": i == 3} for i in range(9)]
    (tmp_path / "in.jsonl").write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    (tmp_path / "out.jsonl").write_text("old\n" * 99)
    words = ["prog.py:ask", "--batch", "in.jsonl", "--out", "out.jsonl", "--arg", "n=0"]
    assert call(*words, "--threads", "4") == 1
    assert capfd.readouterr().err == "sgl-rwttt: 9 rows, 1 failed\n"  # no bar: no terminal
    found = lines_of(tmp_path / "out.jsonl")
    assert [row["ok"] for row in found] == [i != 3 for i in range(9)]
    assert found[3] == {"ok": False, "error": {"type": "ValueError", "message": "as asked"}}
    assert [row["result"] for row in found if row["ok"]] == [
        [f"{i} é", 0] for i in range(9) if i != 3
    ]
    assert found[0]["variables"] == {}
    (tmp_path / "in.jsonl").write_text('{"q": 1, "n": 1}\n')
    assert call("prog.py:ask", "--batch", "in.jsonl", "--quiet") == 0
    out, err = capfd.readouterr()
    assert (json.loads(out)["result"], err) == ([1, 1], "")
    (tmp_path / "in.jsonl").write_text("")
    assert call("prog.py:ask", "--batch", "in.jsonl", "--out", "out.jsonl") == 0
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_progress(
    call: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Nobody can see how far a batch of hours is; or a log file is full of bars."""
    (tmp_path / "in.jsonl").write_text('{"q": 1, "n": 0}\n' * 3)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert call("prog.py:ask", "--batch", "in.jsonl") == 0
    assert "3/3" in capfd.readouterr().err
    assert call("prog.py:ask", "--batch", "in.jsonl", "--quiet") == 0
    assert capfd.readouterr().err == ""


WRONG: list[tuple[list[str], str]] = [
    (["nofile.py:ask"], "there is no file 'nofile.py'"),
    (["prog.py"], "say which program of prog.py: prog.py:ask, prog.py:odd"),
    (["prog.py:asks"], "prog.py has no 'asks'; its programs: prog.py:ask"),
    (["prog.py:not_a_program"], "has no program 'not_a_program'"),
    (["helper.py:x"], "decorate a function with @sgl_rwttt.function"),
    (["prog.py:ask"], "missing a required argument: 'q'; its arguments: q, n, fails"),
    (["prog.py:ask", "--arg", "q"], "write NAME=VALUE"),
    (["prog.py:ask", "--arg", "q=1", "--arg", "q=2"], "given twice"),
    (["prog.py:ask", "--arg", "q=@nofile"], "nofile cannot be read"),
    (["prog.py:ask", "--arg", "q=1", "--arg", "z=2"], "unexpected keyword argument 'z'"),
    (["prog.py:odd", "--temperature", "0"], "'temperature' is an argument of the program"),
    (["prog.py:ask", "--batch", "nofile"], "nofile cannot be read"),
    (["prog.py:ask", "--batch", "bad1.jsonl"], "bad1.jsonl, line 3 is not JSON"),
    (["prog.py:ask", "--batch", "bad2.jsonl"], "bad2.jsonl, line 2: not an object"),
    (["prog.py:ask", "--batch", "bad3.jsonl"], "bad3.jsonl, line 2: ask: missing"),
    (["prog.py:ask", "--batch", "good.jsonl", "--stream"], "--stream is for one run"),
    (["prog.py:ask", "--batch", "good.jsonl", "--trace"], "--trace is for one run"),
    (["prog.py:ask", "--batch", "good.jsonl", "--out", "good.jsonl"], "is the --batch itself"),
    (["prog.py:ask", "--arg", "q=1", "--url", "u", "--snapshot-dir", "d"], "a server has its own"),
    (["prog.py:ask", "--arg", "q=1", "--out", "no/such/file"], "cannot be written"),
    (["prog.py:ask", "--arg", "q=1", "--out", "."], "cannot be written"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=lambda w: w if isinstance(w, str) else "")
def test_wrong_usage_is_2_before_anything_runs(
    words: list[str],
    message: str,
    call: Callable[..., int],
    server: FakeServer,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Half a batch is run, or a model is loaded, before the mistake is found."""
    good = '{"q": 1}\n'
    (tmp_path / "good.jsonl").write_text(good)
    (tmp_path / "bad1.jsonl").write_text(good + "\n{q: 1}\n")
    (tmp_path / "bad2.jsonl").write_text(good + "[1]\n")
    (tmp_path / "bad3.jsonl").write_text(good + '{"n": 1}\n')
    assert call(*words) == 2
    assert message in capfd.readouterr().err
    assert server.log == []
    assert (tmp_path / "good.jsonl").read_text() == good


def test_options_that_exclude_each_other() -> None:
    """The model of the server is taken for the one that was named."""
    for words in (["--url", "http://x", "--model", "m"], ["--threads", "0"], ["--max-tokens", "x"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["run", "prog.py:ask", *words])
        assert end.value.code == 2


def test_a_file_that_cannot_be_imported_is_1(
    call: Callable[..., int], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A traceback through this package hides the line of the file."""
    (tmp_path / "broken.py").write_text("import sys\n\nsys.exit('stop')\n")
    assert call("broken.py:ask") == 1
    assert "broken.py cannot be imported: SystemExit: stop (broken.py, line 3)" in (
        capfd.readouterr().err
    )


def test_a_file_with_a_name_that_is_taken(call: Callable[..., int], tmp_path: Path) -> None:
    """A program in json.py takes the place of the standard library's module."""
    (tmp_path / "json.py").write_text(PROGRAMS)
    assert call("json.py:ask", "--arg", "q=1", "--arg", "n=0", "--out", "o", "--quiet") == 0
    assert sys.modules["json"] is json
    assert call("json.py:ask", "--arg", "q={}", "--arg", "n=0", "--out", "o", "--quiet") == 0
    assert lines_of(tmp_path / "o")[0]["result"] == [{}, 0]


def test_arguments_from_files(call: Callable[..., int], tmp_path: Path) -> None:
    """A document on the command line is cut at a limit or mangled by the shell."""
    (tmp_path / "doc.txt").write_text('{"json": "stays text"}')
    assert call("prog.py:ask", "--arg", "q=@doc.txt", "--arg", "n=0", "--out", "o", "--quiet") == 0
    assert lines_of(tmp_path / "o")[0]["result"] == ['{"json": "stays text"}', 0]


def test_trace(
    call: Callable[..., int], server: FakeServer, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A dry run that talks to a server."""
    assert call("prog.py:ask", "--arg", "q=Q", "--trace") == 0
    assert capfd.readouterr().out == (
        "ask(q='Q')\n  user\n    fill 'Q?'\n  assistant\n    gen 'a0' max_new_tokens=3\n"
        "  returns ['Q', 1]\n"
    )
    assert server.log == []
    assert call("prog.py:ask", "--arg", "q=Q", "--arg", "fails=true", "--trace") == 1
    assert capfd.readouterr().out.endswith("  raises ValueError: as asked\n")
    loop = (
        "from sgl_rwttt import function\n@function\ndef f(s):\n    while True:\n        s += 'x'\n"
    )
    (tmp_path / "loop.py").write_text(loop)
    assert call("loop.py:f", "--trace") == 1
    out, err = capfd.readouterr()
    assert out.count("fill 'x'") == 1000
    assert "more than 1,000 nodes" in err


def test_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key or the snapshot is parsed and forgotten."""
    made: list[Any] = []

    class Backend(StateBackend):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            made.append((args, kwargs))
            super().__init__(FakeTransport(FakeServer()))

    (tmp_path / "p.py").write_text(
        "from sgl_rwttt import function\n@function\ndef f(s):\n    s += 'x'\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("Runtime", "Engine"):
        monkeypatch.setattr(sgl_rwttt, name, Backend, raising=False)
    monkeypatch.setenv("RWTTT_API_KEY", "from-env")
    spec = f"{tmp_path}/p.py:f"
    assert cli.main(["run", spec, "--url", "http://x"]) == 0
    assert cli.main(["run", spec, "--url", "http://x", "--api-key", "k", "--tokenizer", "t"]) == 0
    assert cli.main(["run", spec, "--model", "m"]) == 0
    assert cli.main(["run", spec, "--snapshot-dir", "d", "--quiet"]) == 0
    assert cli.main(["run", spec, "--state", "tutor"]) == 1  # the fake server has no such file
    assert made == [
        (("http://x",), {"api_key": "from-env", "tokenizer_path": None}),
        (("http://x",), {"api_key": "k", "tokenizer_path": "t"}),
        (("m",), {}),
        ((None,), {"ttt_snapshot_dir": "d"}),
        ((None,), {}),
    ]


def test_rows_are_written_as_they_finish() -> None:
    """A batch of hours keeps everything in memory until its last row, and loses it on a kill."""
    seen_two = threading.Event()

    def row(index: int) -> dict[str, Any]:
        return {"row": index, "after": index == 2 and seen_two.wait(30)}

    rows = in_order(row, range(3), 2)
    assert [next(rows)["row"], next(rows)["row"]] == [0, 1]
    seen_two.set()
    assert next(rows) == {"row": 2, "after": True}


def test_ctrl_c_is_130_and_leaves_whole_lines(tmp_path: Path) -> None:
    """The command hangs until the rows in flight are done, or cuts the last line in half."""
    (tmp_path / "p.py").write_text(
        "import time\nfrom sgl_rwttt import function\n@function\ndef f(s, t):\n"
        "    s += 'x'\n    time.sleep(t)\n"
    )
    (tmp_path / "in.jsonl").write_text('{"t": 0}\n' * 5 + '{"t": 600}\n' * 5)
    script = (
        "import sys\nfrom sgl_rwttt.cli import main, run\n"
        "from sgl_rwttt.lang import StateBackend\n"
        "from tests.lang.fake_transport import FakeServer, FakeTransport\n"
        "run._backend = lambda _: StateBackend(FakeTransport(FakeServer()))\n"
        f"sys.exit(main.main(['run', '{tmp_path}/p.py:f', '--batch', '{tmp_path}/in.jsonl',"
        f" '--out', '{tmp_path}/out.jsonl']))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stderr=subprocess.PIPE, text=True
    )
    out = tmp_path / "out.jsonl"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (out.exists() and out.read_text().count("\n") == 5):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert [row["ok"] for row in lines_of(out)] == [True] * 5
