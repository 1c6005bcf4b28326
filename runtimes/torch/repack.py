"""Weights laid out anew for a backend, kept as long as the tensors that they were made from.

A repacked weight costs its own bytes beside the original's: the op's inputs cannot be given up.
Entries go when the storage of a part is gone, at the next repack or `clear()`. A part that was
written to is packed again: torch counts writes, but neither those through `.data` or numpy nor
those to inference tensors, so each use compares sums of the part's bytes, 15 to 30 % of the time
of a matrix-vector product (4096² and 576², one thread). Off the CPU that comparison would wait
for the device: there nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")
_WORDS = 256
"""Words of 8 bytes in a row of the matrix whose rows and columns are summed."""
_ENTRIES: dict[tuple[Any, ...], tuple[tuple[StorageWeakRef, ...], tuple[Tensor, ...], Any]] = {}


def cached(layout: str, parts: tuple[Tensor | None, ...], pack: Callable[[], T]) -> T:
    """`pack()`, made at first use for this layout and these very tensors (None is no tensor).

    The key is each storage with offset, shape and strides, and not the tensor object: compiled
    and loaded programs hand over new views of one storage. A storage that a weak reference
    names keeps its address, so no other can take its place in the key.
    """
    tensors = [part for part in parts if part is not None]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return pack()
    key = (layout, *(_identity(tensor) for tensor in tensors))
    sums = tuple(_sums(tensor) for tensor in tensors)
    entry = _ENTRIES.get(key)
    if entry is None or not all(map(torch.equal, entry[1], sums)):
        for old, (references, _, _) in list(_ENTRIES.items()):
            if any(reference.expired() for reference in references):
                _ENTRIES.pop(old, None)
        references = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        entry = _ENTRIES[key] = (references, sums, pack())
    packed: T = entry[2]
    return packed


def clear() -> None:
    """Forget every repacked weight."""
    _ENTRIES.clear()


def size() -> int:
    """Number of repacked weights kept."""
    return len(_ENTRIES)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _sums(tensor: Tensor) -> Tensor:
    """int64 sums, modulo 2^64, of the rows and columns of the bytes as a matrix of words.

    Rows alone would not see words that change places in a row, columns none in a column. What is
    left of the bytes stands behind the sums as it is.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8:
        data = data.clone()
    bulk = data.shape[0] // (8 * _WORDS) * 8 * _WORDS
    matrix = data[:bulk].view(torch.int64).reshape(-1, _WORDS)
    return torch.cat((matrix.sum(0), matrix.sum(1), data[bulk:].to(torch.int64)))
