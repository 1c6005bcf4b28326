"""Files on their way: temporary names, locks, full disks.

A file is written as `.<name>.<pid>.tmp` beside its target and locked as long as its writer
lives. A killed process leaves such a file and nothing else; its lock is gone, by which the
next save to the same target knows that it may remove it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from qgraph.errors import InputError

_PIECE = 1 << 20
"""Bytes of a file that are copied at once."""


class OutFile:
    """A new file under a temporary name, that threads write at given offsets.

    Raises:
        InputError: the folder cannot be written, or another save of `name` is running.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f".{name}.{os.getpid()}.tmp"
        self.size = 0
        try:
            self.fd = _create_locked(self.path)
        except FileExistsError:
            raise InputError(f"another save to {folder / name} is running") from None
        except OSError as error:
            raise disk_error(error, self.path, 0) from error
        self._open = True
        self._syncing: Future[None] | None = None

    def allocate(self, size: int) -> None:
        """Reserve `size` bytes, so that a full disk is noticed before hours of work."""
        self.size = size
        if not size:
            return
        try:
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise disk_error(error, self.path, size) from error
            os.ftruncate(self.fd, size)

    def write_at(self, offset: int, data: memoryview | bytes) -> None:
        """Write all of `data`.

        Raises:
            InputError: the disk is full or the file cannot be written.
        """
        rest = memoryview(data)
        try:
            while rest:
                written = os.pwrite(self.fd, rest, offset)
                rest, offset = rest[written:], offset + written
        except OSError as error:
            raise disk_error(error, self.path, max(self.size, offset + len(rest))) from error

    def start_sync(self) -> None:
        """Begin to bring the data to the disk; other work can go on meanwhile."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="qgraph-sync")
        self._syncing = pool.submit(os.fsync, self.fd)
        pool.shutdown(wait=False)

    def sync(self) -> None:
        """Wait until the data is on the disk."""
        try:
            if self._syncing is not None:
                self._syncing.result()
            else:
                os.fsync(self.fd)
        except OSError as error:
            raise disk_error(error, self.path, self.size) from error

    def rename(self, target: Path) -> None:
        """Give the file its name, replacing what is there; durable when this returns."""
        try:
            os.replace(self.path, target)
            sync_folder(target.parent)
        except OSError as error:
            raise disk_error(error, target, self.size) from error
        self._close()

    def discard(self) -> None:
        """Remove the file, unless it was renamed; may be called twice."""
        if self._open:
            self.path.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if self._open:
            if self._syncing is not None:
                wait([self._syncing])
            self._open = False
            os.close(self.fd)


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths name one file, links followed; neither needs to exist."""
    return os.path.realpath(a) == os.path.realpath(b) or (
        a.exists() and b.exists() and a.samefile(b)
    )


def why_unwritable(folder: Path) -> str:
    """Why no new file can be made in a folder; empty where one can. Leaves none there."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"cannot write in {folder}: {error.strerror or error}"


def require_new(output: Path, *, in_folder: bool) -> None:
    """Refuse the place of a new checkpoint before any work; leaves nothing there.

    in_folder: its folder has to be there; folders above a folder are made with it.

    Raises:
        InputError: there is something, there is no such folder, or it cannot be written.
    """
    if os.path.lexists(output):
        raise InputError(f"{output} exists: choose another place, or remove it first")
    folder = output.absolute().parent
    if in_folder and not folder.is_dir():
        raise InputError(f"there is no folder {folder}: create it, or choose another output")
    while not os.path.lexists(folder):
        folder = folder.parent
    why = why_unwritable(folder)
    if why:
        raise InputError(f"{why}; choose another output")


def write_file(target: Path, data: bytes) -> None:
    """Write a file, or replace what is there: all of it or nothing.

    Raises:
        InputError: the folder cannot be written, or the disk is full.
    """
    _write(target, [data])


def copy_file(source: Path, target: Path) -> None:
    """Copy a file, or replace what is there: all of it or nothing.

    Raises:
        InputError: the file cannot be read, the folder cannot be written, or the disk is full.
    """
    try:
        with source.open("rb") as opened:
            _write(target, iter(lambda: opened.read(_PIECE), b""))
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}") from error


def _write(target: Path, pieces: Iterable[bytes]) -> None:
    for left in abandoned(target.parent, target.name):
        left.unlink(missing_ok=True)
    file, at = OutFile(target.parent, target.name), 0
    try:
        for piece in pieces:
            file.write_at(at, piece)
            at += len(piece)
        file.sync()
        file.rename(target)
    finally:
        file.discard()


def disk_error(error: OSError, path: Path, needed: int) -> InputError:
    """What a failed write means to the user."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return InputError(f"cannot write in {path.parent}: {error.strerror or error}")
    held = path.stat().st_blocks * 512 if path.exists() else 0
    free = shutil.disk_usage(path.parent).free + held
    return InputError(
        f"no space left in {path.parent}: {needed:,} bytes needed, {free:,} free; "
        "free some space there or choose another output folder"
    )


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable, where its file system can."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def abandoned(folder: Path, name: str) -> Iterator[Path]:
    """The temporary files of `name` that no living process writes, oldest name first."""
    pattern = re.compile(re.escape(f".{name}.") + r"[0-9]+\.tmp")
    for entry in sorted(os.listdir(folder)):
        path = folder / entry
        if pattern.fullmatch(entry) and path.is_file() and not path.is_symlink():
            with contextlib.suppress(OSError), open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path


def _create_locked(path: Path) -> int:
    """Create and lock `path`; again where another process took it for abandoned meanwhile."""
    while True:
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.stat(path), os.fstat(fd)):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
