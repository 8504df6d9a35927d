"""The folder of ``--ttt-snapshot-dir``: names, limits, files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import BinaryIO

from sgl_rwttt.core.errors import InvalidStateRequest, StateCapacity, StateError, UnknownState

FLAG = "--ttt-snapshot-dir"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_LEFTOVER = re.compile(r"\.[0-9a-f]{16}\.tmp")
_LEFTOVER_AGE_S = 3600.0  # no save takes this long
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def check_folder(folder: str) -> None:
    """Raise ValueError, naming the flag, unless the folder can be listed and written."""
    if not os.path.isdir(folder):
        raise ValueError(f"{FLAG}={folder}: there is no such folder")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{FLAG}={folder}: the folder cannot be read and written")


def check_name(name: str) -> str:
    """Return a name that is one plain path component; raises InvalidStateRequest."""
    if _NAME.fullmatch(name) is None:
        raise InvalidStateRequest(
            "a snapshot's name has 1 to 128 characters of A-Z a-z 0-9 . _ - and does not start "
            f"with a dot, got {name[:140]!r}"
        )
    return name


class SnapshotFolder:
    """Regular files directly in one folder. Nothing outside of it is ever read or written."""

    def __init__(self, folder: str, max_bytes: int, max_files: int) -> None:
        """Open the folder and remove what killed processes left; ValueError from check_folder."""
        check_folder(folder)
        self.folder = os.path.abspath(folder)
        self.max_bytes = max_bytes
        self.max_files = max_files
        self._remove_leftovers()

    def names(self) -> list[str]:
        """Names of the snapshots, sorted. Links, folders and other names are left out."""
        with _system_errors("list the snapshots"), os.scandir(self.folder) as entries:
            return sorted(
                entry.name
                for entry in entries
                if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
            )

    def check_new(self, name: str, replace: bool) -> None:
        """Raise unless ``name`` may be written now: InvalidStateRequest, StateCapacity."""
        try:
            mode = os.lstat(self._path(name)).st_mode
        except FileNotFoundError:
            if len(self.names()) >= self.max_files:
                raise StateCapacity(
                    f"the folder holds {self.max_files} snapshots: delete some or raise "
                    "--ttt-max-snapshots"
                ) from None
            return
        if not stat.S_ISREG(mode):
            raise InvalidStateRequest(f"{name!r} exists and is not a regular file")
        if not replace:
            raise InvalidStateRequest(
                f"snapshot {name!r} exists: give replace: true, or a new name"
            )

    def check_size(self, size: int) -> None:
        """Raise StateCapacity for a file larger than the limit."""
        if size > self.max_bytes:
            raise StateCapacity(
                f"a snapshot of {size} bytes is larger than {self.max_bytes}: raise "
                "--ttt-snapshot-mb"
            )

    def create(
        self, name: str, write: Callable[[BinaryIO], None], *, replace: bool = False
    ) -> None:
        """Have ``write`` fill a temporary file, sync it, and give it its name.

        Raises as `check_new`, since another process may have saved meanwhile; StateCapacity when
        the disk is full, StateError for another system error. The folder is as before then.
        """
        final = self._path(name)
        temporary = os.path.join(self.folder, f".{secrets.token_hex(8)}.tmp")
        with _system_errors(f"write snapshot {name!r}"):
            try:
                with open(temporary, "xb", opener=_private) as stream:
                    write(stream)
                    stream.flush()
                    os.fsync(stream.fileno())
                with self._alone():
                    self.check_new(name, replace)
                    os.rename(temporary, final)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            self._sync()

    @contextmanager
    def open(self, name: str) -> Iterator[tuple[BinaryIO, int]]:
        """(stream, bytes) of a snapshot.

        Raises UnknownState when there is none, InvalidStateRequest for anything but a regular
        file (a link is not followed), StateCapacity for one larger than the limit.
        """
        with _system_errors(f"read snapshot {name!r}"):
            stream, size = _open_regular(self._path(name), name)
            with stream:
                self.check_size(size)
                yield stream, size

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, check_name(name))

    @contextmanager
    def _opened(self) -> Iterator[int]:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Other ranks and servers that share the folder wait here, where it can be locked."""
        with self._opened() as descriptor:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield

    def _sync(self) -> None:
        with self._opened() as descriptor:
            os.fsync(descriptor)

    def _remove_leftovers(self) -> None:
        for name in os.listdir(self.folder):
            path = os.path.join(self.folder, name)
            with contextlib.suppress(OSError):
                if _LEFTOVER.fullmatch(name) and _age(path) > _LEFTOVER_AGE_S:
                    os.unlink(path)


def _open_regular(path: str, name: str) -> tuple[BinaryIO, int]:
    """(stream, bytes) of a regular file; a link is not followed, a pipe not waited for."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise UnknownState(f"there is no snapshot {name!r}") from None
    except OSError as error:
        raise InvalidStateRequest(f"{name!r} cannot be opened: {error.strerror}") from None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise InvalidStateRequest(f"{name!r} is not a regular file")
    return os.fdopen(descriptor, "rb"), found.st_size


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _age(path: str) -> float:
    return time.time() - os.lstat(path).st_mtime


@contextmanager
def _system_errors(doing: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind = StateCapacity if error.errno in _NO_ROOM else StateError
        raise kind(f"cannot {doing}: {error.strerror or error}") from error
