"""`sgl-rwttt bench` with benchmarks that take no time, and the pages that it writes to."""

from __future__ import annotations

import contextlib
import csv
import json
import shutil
import sys
from pathlib import Path

import psutil
import pytest

from sgl_rwttt.cli import bench, bench_process
from sgl_rwttt.cli import main as cli
from sgl_rwttt.cli.bench_page import blocks, replaced
from sgl_rwttt.cli.bench_parts import PARTS, Part, Script, scripts_folder
from sgl_rwttt.cli.bench_tables import markdown_tables
from sgl_rwttt.cli.errors import CommandFailed, UsageError
from tests.benchmarks.scripts import BENCHMARKS, load

DOCS = BENCHMARKS.parent / "docs"
TINY = """
import argparse, sys
from common import add_run_flags, markdown_table, run
from plots import new_figure, save

def parse(arguments):
    parser = argparse.ArgumentParser()
    add_run_flags(parser)
    return parser.parse_args(arguments)

def measure(options, arguments):
    print("measuring ...", file=sys.stderr)
    return {"threads": options.threads}

def render(report):
    table = markdown_table(["threads", "a\\\\|b"], [[str(report["threads"]), "x"]])
    return "a machine\\n\\n" + table

def plot(report, folder):
    figure = new_figure("tiny")
    figure.subplots().plot([0, report["threads"]])
    return [save(figure, folder / "tiny-line.png")]

def main(arguments=None):
    return run(arguments, parse, measure, render)

if __name__ == "__main__":
    main()
"""
GATE = 'print("| a |\\n|---|\\n| 1 |")\nraise SystemExit("the gate failed")\n'
PAGE = """\
# Page

<!-- results: bench_tiny -->
old
<!-- end: bench_tiny -->

A remark.

<!-- results: bench_gate -->
kept
<!-- end: bench_gate -->
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of benchmarks: one that works, one whose gate fails, one that is not there."""
    scripts = tmp_path / "benchmarks"
    scripts.mkdir()
    for name in ("common.py", "plots.py"):
        shutil.copy(BENCHMARKS / name, scripts)
    (scripts / "bench_tiny.py").write_text(TINY)
    (scripts / "bench_gate.py").write_text(GATE)
    parts = (
        Part("broken", "", (Script("bench_gate", 1), Script("bench_none", 1))),
        Part("tiny", "", (Script("bench_tiny", 1),)),
    )
    monkeypatch.setattr(bench, "PARTS", parts)
    monkeypatch.setattr(bench, "scripts_folder", lambda: scripts)
    return scripts


def test_the_whole_path(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards: a failed script that stops the others or is published, tables or plots that are
    lost, a resumed run that measures again, a page whose remarks are touched."""
    out, page = tmp_path / "out", tmp_path / "page.md"
    page.write_text(PAGE)
    given = ["bench", "all", "--out", str(out), "--threads", "3", "--quiet"]
    assert cli.main([*given, "--page", str(page)]) == 1
    captured = capsys.readouterr()
    lines = [line.split()[1:] for line in captured.out.splitlines()]
    assert [line[1:3] for line in lines[1:]] == [
        ["bench_gate", "FAILED,"],
        ["bench_none", "FAILED,"],
        ["bench_tiny", "done"],
    ]
    assert "the gate failed" in captured.err and "bench_none.py" in captured.err
    assert json.loads((out / "bench_tiny.json").read_text()) == {"threads": 3}
    assert "measuring" in (out / "bench_tiny.log").read_text()
    with (out / "bench_tiny-1.csv").open() as file:
        assert list(csv.reader(file)) == [["threads", "a|b"], ["3", "x"]]
    assert (out / "bench_gate-1.csv").is_file()

    text = page.read_text()
    assert text.endswith(PAGE.partition("<!-- end: bench_tiny -->")[2])
    assert "a machine" in text and "![tiny line](plots/tiny-line.png)" in text
    assert "old" not in text and "kept" in text
    assert (tmp_path / "plots/tiny-line.png").read_bytes() == (out / "tiny-line.png").read_bytes()
    assert cli.main(["bench", "page", "--from", str(out), "--page", str(page)]) == 0
    assert page.read_text() == text

    (folder / "bench_gate.py").write_text("print('good')")
    (folder / "bench_tiny.py").write_text("raise SystemExit('measured again')")
    assert cli.main([*given, "--resume"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()[2:]) for line in lines[1:]] == [
        "bench_gate done",
        "bench_none FAILED, exit status 2",
        "bench_tiny done before",
    ]


def test_only_one_kind_of_run_in_a_folder(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards: results of two runs in one folder, numbers of a toy size on a page."""
    out, page = str(tmp_path / "out"), tmp_path / "page.md"
    page.write_text(PAGE)
    given = ["bench", "tiny", "--quiet", "--threads", "1", "--out"]
    assert cli.main([*given, str(tmp_path)]) == 2
    assert cli.main([*given, str(tmp_path), "--resume"]) == 2
    assert cli.main([*given, str(page)]) == 2
    (folder / "bench_tiny.py").write_text("import sys; print(sys.argv)")
    assert cli.main([*given, out, "--quick"]) == 0
    assert "--quick" in (tmp_path / "out/bench_tiny.md").read_text()
    for more, said in (
        ([], "is not empty"),
        (["--resume"], "with quick True, not False"),
        (["--resume", "--quick", "--threads", "2"], "with threads 1, not 2"),
    ):
        assert cli.main([*given, out, *more]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["bench", "page", "--from", out, "--page", str(page)]) == 2
    assert page.read_text() == PAGE


def test_a_plot_that_fails_is_drawn_again(folder: Path, tmp_path: Path) -> None:
    """Guards: an hour measured again for a mistake in a plot, a run without plots that is good."""
    out = tmp_path / "out"
    given = ["bench", "tiny", "--quiet", "--threads", "2", "--out", str(out)]
    (folder / "bench_tiny.py").write_text(TINY.replace("[0, report", "[0, nothing, report"))
    assert cli.main(given) == 1
    (folder / "bench_tiny.py").write_text(TINY.replace("[0, report", "[1, report"))
    assert cli.main([*given, "--resume"]) == 0
    assert (out / "tiny-line.png").is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        ["none", "--out", "x"],
        ["tiny"],
        ["list", "tiny"],
        ["page", "--from", "x"],
        ["page", "--from", "nowhere", "--page", "y"],
        ["tiny", "--from", "x", "--out", "y"],
        ["tiny", "--out", "x", "--page", "nowhere.md"],
        ["tiny", "--out", "x", "--quick", "--page", __file__],
    ],
    ids=" ".join,
)
def test_wrong_usage(
    arguments: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards: hours of a run that cannot end as it was asked for."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *arguments]) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["benchmarks"]


def test_nothing_is_left_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: an engine that goes on after Ctrl-C, or after the time limit, and disturbs the next
    measurement; a wait without an end."""
    monkeypatch.setattr(bench_process, "TICK_S", 0.1)
    code = (
        "import subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    out = tmp_path / "out"

    def tick(seconds: float) -> None:
        if interrupt and out.read_text():
            raise KeyboardInterrupt

    for interrupt, limit_s in ((True, 60.0), (False, 2.0)):
        caught = pytest.raises(KeyboardInterrupt) if interrupt else contextlib.nullcontext()
        with caught:
            status = bench_process.run_process(
                [sys.executable, "-c", code], tmp_path, {}, (out, tmp_path / "log"), limit_s, tick
            )
            assert status == bench_process.TIMED_OUT
        worker = int(out.read_text())
        gone = not psutil.pid_exists(worker)
        assert gone or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
    assert "not done after 2 s" in (tmp_path / "log").read_text()


def test_tables_of_a_report() -> None:
    """Guards: text or a second table taken for rows of the first."""
    text = "x | y\n\n| a | b |\n|---|:-:|\n| 1 | |\n\n- | no\n\n| c |\n|---|\n| 2 |\n| 3 |\n"
    assert markdown_tables(text) == [[["a", "b"], ["1", ""]], [["c"], ["2"], ["3"]]]


@pytest.mark.parametrize(
    "text",
    [
        "<!-- results: a -->\n",
        "<!-- end: a -->\n",
        "<!-- results: a -->\n<!-- end: b -->\n",
        "<!-- results: a -->\n<!-- results: b -->\n<!-- end: b -->\n<!-- end: a -->\n",
        "<!-- results: a -->\n<!-- end: a -->\n" * 2,
    ],
)
def test_broken_blocks(text: str) -> None:
    """Guards: a remark that is taken for results and replaced."""
    with pytest.raises(UsageError):
        blocks(text)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_blocks_of_the_pages(page: Path) -> None:
    """Guards: a marker without its end, an update that is not the same twice or touches more."""
    text = page.read_text()
    contents = {name: f"new {name}" for name in blocks(text)}
    once = replaced(text, contents)
    assert replaced(once, contents) == once
    assert all(f"\n\nnew {name}\n\n<!-- end: {name} -->" in once for name in contents)
    before = [text[end:] for _, end in blocks(text).values()]
    after = [once[end:] for _, end in blocks(once).values()]
    assert before[-1:] == after[-1:]


def test_parts_and_their_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards: a script that was renamed or takes other flags, results without a place."""
    monkeypatch.setattr(load("bench_ruler"), "HARNESS", Path(sys.executable))
    folder = scripts_folder()
    assert folder == BENCHMARKS
    scripts = [script for part in PARTS for script in part.scripts]
    names = [script.name for script in scripts]
    assert len(set(names)) == len(names)
    places = {name for page in DOCS.glob("*.md") for name in blocks(page.read_text())}
    for script in scripts:
        assert script.name in places, script.name
        for quick in (True, False):
            load(script.name).parse(script.arguments(quick))


def test_where_the_scripts_are(tmp_path: Path) -> None:
    """Guards: an installed package that looks for a checkout, a folder of another project."""
    package = tmp_path / "sgl_rwttt"
    (tmp_path / "benchmarks").mkdir()
    with pytest.raises(CommandFailed, match="install sgl-rwttt"):
        scripts_folder(package)
    (package / "benchmarks").mkdir(parents=True)
    (package / "benchmarks/common.py").touch()
    assert scripts_folder(package) == package / "benchmarks"
