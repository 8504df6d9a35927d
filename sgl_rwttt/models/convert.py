"""From a plain checkpoint to an In-Place TTT checkpoint, with a recipe that needs no training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgl_rwttt.srt_ext.checkpoint import check_checkpoint

from .checkpoint import Checkpoint, whole_folder, write_folder
from .eager import EagerModel
from .embedded import DType
from .hebbian import HebbianRecipe, add_hebbian
from .held_out import LENGTH, HeldOut, check
from .hf_folder import read_folder
from .measure import WINDOW, Measured, fitted_recipe, measure, windows_of
from .progress import Steps
from .texts import DOCUMENTS, FREQUENCY, text


@dataclass(frozen=True)
class Settings:
    """What the caller decided; None is measured, or the default."""

    layers: tuple[int, ...] | None = None
    kappa: tuple[float, ...] | None = None  # one per layer, in their order
    chunk: int = 32
    lr: float | None = None  # default: kappa of the first layer
    gain: float | None = None
    dtype: DType | None = None  # default: that of the source
    sample: Path | None = None  # text to measure on and to count tokens in
    documents: tuple[Path, ...] = ()  # for the held-out check; default: the package's
    is_checked: bool = True
    overwrite: bool = False

    def __post_init__(self) -> None:
        numbers = (self.lr, self.gain, *(self.kappa or ()))
        if any(each is not None and not 0 < each < float("inf") for each in numbers):
            raise ValueError("kappa, lr and gain are finite numbers above 0")
        if self.layers is not None and list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers {list(self.layers)} are not in ascending order")
        if self.chunk < 1:
            raise ValueError(f"chunk {self.chunk}: at least 1")
        if self.kappa is not None and len(self.kappa) != len(self.layers or ()):
            raise ValueError("give one kappa per layer, together with the layers")
        if len(self.documents) == 1:
            raise ValueError("the held-out check needs at least two documents")


@dataclass(frozen=True)
class Conversion:
    """What was made, and what is known of it."""

    folder: Path
    recipe: HebbianRecipe
    dtype: str
    measured: Measured | None  # None: everything was given
    held_out: HeldOut | None  # None: not asked for


def convert(source: Path, target: Path, settings: Settings, progress: bool = True) -> Conversion:
    """Write the TTT checkpoint of `source` (a folder or a llama GGUF file) to `target`.

    The folder appears complete or not at all. Raises ValueError with the reason when the source
    cannot be converted, FileExistsError when there is something at the target.
    """
    check_target(source, target, settings.overwrite)
    with Steps("convert", 3, progress) as step:
        step("read")
        checkpoint = read_source(source)
        sample = text(FREQUENCY) if settings.sample is None else _read(settings.sample)
        token_ids = checkpoint.encode(sample, False)
        model = EagerModel(checkpoint)
        length = min(LENGTH, model.context)
        documents = _documents(checkpoint, settings, length) if settings.is_checked else {}
        recipe, measured = _recipe(checkpoint, model, token_ids, settings, step)
        step("TTT weights")
        add_hebbian(checkpoint.config, checkpoint.weights, token_ids, recipe)
        held_out = None
        if documents:
            step.more(4 * len(documents))
            held_out = check(model, documents, lambda: step("held-out check"))
        step("write")
        dtype = settings.dtype or checkpoint.dtype
        target.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(target) as folder:
            write_folder(folder, checkpoint, dtype)
            check_checkpoint(str(folder), checkpoint.config)
    return Conversion(target, recipe, dtype, measured, held_out)


def check_target(source: Path, target: Path, overwrite: bool) -> None:
    """Raise FileExistsError unless `target` is free, or a folder that may be replaced."""
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target} is a file, not a folder")
    inside = target.resolve() in (source.resolve(), *source.resolve().parents)
    if target.is_dir() and any(target.iterdir()):
        if inside:
            raise FileExistsError(f"{target} holds the source {source}: choose another folder")
        if not overwrite:
            raise FileExistsError(f"{target} is not empty: choose another folder, or --overwrite")


def read_source(source: Path) -> Checkpoint:
    """A checkpoint folder, or a llama GGUF file, in memory; ValueError with the reason."""
    if source.is_dir():
        return read_folder(source)
    if not source.is_file():
        raise ValueError(f"{source} does not exist")
    if source.suffix != ".gguf":
        raise ValueError(f"{source} is neither a checkpoint folder nor a .gguf file")
    from . import gguf_llama

    return gguf_llama.read_checkpoint(gguf_llama.open_gguf(source))


def _recipe(
    checkpoint: Checkpoint,
    model: EagerModel,
    token_ids: Sequence[int],
    settings: Settings,
    step: Steps,
) -> tuple[HebbianRecipe, Measured | None]:
    given = {
        name: value
        for name in ("layers", "kappa", "lr", "gain", "chunk")
        if (value := getattr(settings, name)) is not None
    }
    if settings.kappa is not None:
        given.setdefault("lr", settings.kappa[0])
    if settings.kappa is not None and settings.gain is not None:
        return HebbianRecipe(**given), None
    windows = windows_of(token_ids, checkpoint.encode("", True), min(WINDOW, model.context))
    step.more(len(windows))
    step("measure")
    found = measure(model, windows, lambda: step("measure"))
    fitted = fitted_recipe(checkpoint, found, token_ids, settings.layers)
    return dataclasses.replace(fitted, **given), found


def _documents(checkpoint: Checkpoint, settings: Settings, length: int) -> dict[str, list[int]]:
    """Token ids of the held-out documents, as they stand at the start of a context."""
    texts = {str(path): _read(path) for path in settings.documents} or {
        name: text(name) for name in DOCUMENTS
    }
    documents = {name: checkpoint.encode(each, True)[:length] for name, each in texts.items()}
    for name, ids in documents.items():
        if len(ids) <= settings.chunk:
            raise ValueError(
                f"document {name} has {len(ids)} tokens, not more than a chunk of {settings.chunk}"
            )
    return documents


def _read(path: Path) -> str:
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not content.strip():
        raise ValueError(f"{path} is empty")
    return content
