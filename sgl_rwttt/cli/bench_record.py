"""What a folder of results holds: ``bench.json``, kept up to date while a run goes on."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

import sgl_rwttt

from .errors import UsageError

FILE = "bench.json"


@dataclass
class Done:
    """One script that has ended."""

    status: int  # its exit status
    seconds: float
    plots: list[str] | None = None  # file names; None where drawing failed


@dataclass
class Record:
    """The run of a folder: what all its scripts had in common, and how each ended."""

    version: str
    quick: bool
    threads: int
    scripts: dict[str, Done] = field(default_factory=dict)

    def is_done(self, script: str) -> bool:
        """Whether the script ended well."""
        return script in self.scripts and self.scripts[script].status == 0

    def write(self, folder: Path) -> None:
        """Replace the folder's record, whole or not at all."""
        new = folder / f".{FILE}"
        new.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(new, folder / FILE)

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Raises UsageError for a folder without a record that can be read."""
        try:
            given = json.loads((folder / FILE).read_text(encoding="utf-8"))
            scripts = {name: Done(**done) for name, done in given.pop("scripts").items()}
            return cls(**given, scripts=scripts)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{folder} holds no results of sgl-rwttt bench") from error

    @classmethod
    def begin(cls, folder: Path, quick: bool, threads: int, resume: bool) -> Record:
        """The record of a new folder, or with `resume` that of one with an earlier run's results.

        Raises UsageError for a folder that is not empty without `resume`, and with it for one whose
        run had other settings: a ratio must come from one kind of run.
        """
        fresh = cls(sgl_rwttt.__version__, quick, threads)
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {folder} is a file, not a folder")
        if not folder.exists() or not any(folder.iterdir()):
            return fresh
        if not resume:
            raise UsageError(
                f"--out {folder} is not empty: name another folder, or go on with --resume"
            )
        record = cls.read(folder)
        for name in ("version", "quick", "threads"):
            if (old := getattr(record, name)) != (new := getattr(fresh, name)):
                raise UsageError(f"--resume: {folder} was made with {name} {old}, not {new}")
        return record
