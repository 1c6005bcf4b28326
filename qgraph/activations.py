"""A store for activations by batch and name: in memory up to a limit, above it in files."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qgraph.errors import InputError

LIMIT = 640 << 20
"""Bytes that stay in memory where nothing else is asked for."""

_Array = NDArray[Any]
_Key = tuple[int, str]


class Activations:
    """Arrays by batch and name; those that memory has no room for lie in a temporary folder.

    Arrays are kept as they are given, not copied: whoever gave one leaves it alone. The largest
    go to files first, of those of one size the oldest. What comes back from a file is mapped
    (its pages are not counted here, and the system may take them back), equal bit for bit, and
    stays readable after it was dropped. The folder is made with the first file and removed by
    `close`, at the end of a `with` block, or with the last reference to this object.

    Args:
        limit: bytes in memory, at most; 0 puts everything in files.
        folder: where the temporary folder is made; None for the system's (`TMPDIR`).
    """

    def __init__(self, limit: int = LIMIT, folder: Path | None = None) -> None:
        self.limit = limit
        self._parent = folder
        self._folder: Path | None = None
        self._remove: weakref.finalize[..., Any] | None = None
        self._memory: dict[_Key, _Array] = {}
        self._files: dict[_Key, tuple[Path, np.dtype[Any], tuple[int, ...]]] = {}
        self._ages: dict[_Key, int] = {}
        self._counter = itertools.count()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that lie in memory."""
        return self._nbytes

    def put(self, batch: int, name: str, array: _Array) -> None:
        """Store an array, in place of one that has this batch and name.

        Raises:
            InputError: it, or another one, has to go to a file that cannot be written.
        """
        key = (batch, name)
        self._forget(key)
        self._memory[key] = array
        self._ages[key] = next(self._counter)
        self._nbytes += array.nbytes
        while self._nbytes > self.limit:
            victim = self._largest()
            if victim is None:
                break
            self._spill(victim)

    def get(self, batch: int, name: str) -> _Array:
        """The array of a batch; KeyError where there is none."""
        key = (batch, name)
        if key not in self._files:
            return self._memory[key]
        path, dtype, shape = self._files[key]
        # Copy on write: torch refuses to share memory that cannot be written.
        mapped = np.memmap(path, np.uint8, mode="c")
        return np.asarray(mapped).view(dtype).reshape(shape)

    def has(self, batch: int, name: str) -> bool:
        """Whether an array of this batch and name is stored."""
        return (batch, name) in self._memory or (batch, name) in self._files

    def drop(self, name: str) -> None:
        """Forget the arrays of this name, of all batches."""
        for key in [key for key in self._ages if key[1] == name]:
            self._forget(key)

    def close(self) -> None:
        """Forget everything and remove the folder; may be called twice."""
        for held in (self._memory, self._files, self._ages):
            held.clear()
        self._nbytes = 0
        if self._remove is not None:
            self._remove()
        self._folder = None

    def __enter__(self) -> Activations:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _forget(self, key: _Key) -> None:
        if key in self._memory:
            self._nbytes -= self._memory.pop(key).nbytes
        if key in self._files:
            self._files.pop(key)[0].unlink(missing_ok=True)
        self._ages.pop(key, None)

    def _largest(self) -> _Key | None:
        """The next to go; None where nothing is left that a file could hold."""
        keys = [k for k, array in self._memory.items() if array.nbytes and not _is_object(array)]
        return max(keys, key=lambda k: (self._memory[k].nbytes, -self._ages[k]), default=None)

    def _spill(self, key: _Key) -> None:
        array = self._memory[key]
        # As bytes: numpy's own file format has no bfloat16 and no other type of ml_dtypes.
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        path = None
        try:
            path = self._place() / str(self._ages[key])
            with path.open("wb") as file:
                file.write(raw.data)
        except OSError as error:
            if path is not None:
                path.unlink(missing_ok=True)
            folder = self._folder or self._parent or Path(tempfile.gettempdir())
            raise InputError(
                f"calibration: {array.nbytes / 1e6:.1f} MB of activations ({key[1]}, batch "
                f"{key[0]}) cannot be written to the temporary folder {folder}: "
                f"{error.strerror or error}; make room there, name another folder in TMPDIR, or "
                "give fewer --samples or a shorter --sequence"
            ) from error
        self._files[key] = (path, array.dtype, array.shape)
        self._nbytes -= self._memory.pop(key).nbytes

    def _place(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="qgraph-", dir=self._parent))
            self._remove = weakref.finalize(
                self, shutil.rmtree, str(self._folder), ignore_errors=True
            )
        return self._folder


def _is_object(array: _Array) -> bool:
    return bool(array.dtype.hasobject)
