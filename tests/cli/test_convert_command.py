"""sgl-rwttt convert: options, report, exit statuses. The conversion is tested in tests/models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sgl_rwttt.cli import convert as command
from sgl_rwttt.cli import main as cli
from sgl_rwttt.models import convert as convert_module
from tests.models.tiny import save_tiny

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "base"
    save_tiny(folder)
    return folder


def test_report(
    base: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A conversion of noise is handed out without a word on what it is worth."""
    monkeypatch.setattr(command, "is_shown", lambda _quiet: True)
    target = tmp_path / "deep" / "ttt"
    words = ["convert", str(base), str(target), "--chunk", "8", "--gain", "1e-9"]
    assert cli.main(words) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert re.fullmatch(r"measured on \d+ tokens:", lines[0])
    assert [line.endswith("taken") for line in lines[2:6]] == [False, True, True, True]
    assert re.search(r"hebbian: layers 1, 2, 3; chunk 8, lr \S+, gain \S+", out)
    change = r"\d\.\d{3} -> \d\.\d{3} nats per token, change \S+ \+- \S+ \(\S+ %, n = 3\)"
    assert len(re.findall(change, out)) == 2
    assert "It does not help: adapting on a document does not make it cheaper to read." in lines
    assert lines[-1] == f"{target} (float32)"
    assert "convert: done" in err and "held-out check" in err
    config = json.loads((target / "config.json").read_text())
    assert (config["ttt_layers"], config["ttt_chunk"]) == ([1, 2, 3], 8)


def test_options_reach_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is shown in --help and does nothing."""
    seen: list[Any] = []

    class Stop(Exception):
        pass

    def convert(*given: Any) -> None:
        seen[:] = given
        raise Stop

    monkeypatch.setattr(convert_module, "convert", convert)
    words = "--recipe hebbian --layers 1,3 --kappa 0.5,0.25 --chunk 16 --lr 0.1 --gain 2 --text t"
    words += " --dtype float16 --held-out a --held-out b --no-check --overwrite --quiet"
    with pytest.raises(Stop):
        cli.main(["convert", "source", str(tmp_path), *words.split()])
    assert seen == [
        Path("source"),
        tmp_path,
        convert_module.Settings(
            layers=(1, 3),
            kappa=(0.5, 0.25),
            chunk=16,
            lr=0.1,
            gain=2.0,
            dtype="float16",
            sample=Path("t"),
            documents=(Path("a"), Path("b")),
            is_checked=False,
            overwrite=True,
        ),
        False,
    ]


def test_quiet_prints_the_folder(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script has to parse a report."""
    target = str(tmp_path / "ttt")
    assert cli.main(["convert", str(base), target, "--quiet", "--no-check"]) == 0
    assert capfd.readouterr() == (f"{target}\n", "")
    assert cli.main(["convert", str(base), target, "--quiet", "--no-check"]) == 2
    assert "is not empty" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["--kappa", "0.1"], 2, "one kappa per layer"),
        (["--held-out", "one"], 2, "at least two documents"),
        (["--layers", "2,1"], 2, "ascending"),
        (["--layers", "1,9"], 1, "0 to 3"),
        (["--text", "nofile"], 1, "nofile"),
        (["--chunk", "400"], 1, "not more than a chunk of 400"),
    ],
)
def test_failures(
    words: list[str],
    status: int,
    message: str,
    base: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A traceback; something left at the target."""
    assert cli.main(["convert", str(base), str(tmp_path / "ttt"), *words]) == status
    assert message in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_another_architecture_is_1(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A model of another kind is converted into one that talks nonsense."""
    source = tmp_path / "mistral"
    source.mkdir()
    (source / "config.json").write_text('{"architectures": ["MistralForCausalLM"]}')
    assert cli.main(["convert", str(source), str(tmp_path / "ttt")]) == 1
    assert "MistralForCausalLM is not supported, only LlamaForCausalLM and Qwen3ForCausalLM" in (
        capfd.readouterr().err
    )
    for bad in (["--layers", "a"], ["--recipe", "magic"], ["--chunk", "0"]):
        with pytest.raises(SystemExit) as end:
            cli.main(["convert", "a", "b", *bad])
        assert end.value.code == 2
