"""Weights laid out anew for a backend, kept as long as the tensors that they were made from.

A repacked weight costs its own bytes beside the original's: the op's inputs cannot be given up.
Entries go when the storage of a part is gone, at the next repack or `clear()`; a part that was
written to in place is packed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

T = TypeVar("T")
_ENTRIES: dict[tuple[Any, ...], tuple[tuple[StorageWeakRef, ...], Any]] = {}


def cached(layout: str, parts: tuple[Tensor | None, ...], pack: Callable[[], T]) -> T:
    """`pack()`, made at first use for this layout and these very tensors (None is no tensor).

    The key is each storage with offset, shape and version, and not the tensor object: compiled
    and loaded programs hand over new views of one storage. A storage that a weak reference
    names keeps its address, so no other can take its place in the key.
    """
    tensors = [part for part in parts if part is not None]
    key = (layout, *(_identity(tensor) for tensor in tensors))
    entry = _ENTRIES.get(key)
    if entry is None:
        for old, (references, _) in list(_ENTRIES.items()):
            if any(reference.expired() for reference in references):
                _ENTRIES.pop(old, None)
        references = tuple(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)
        entry = _ENTRIES.setdefault(key, (references, pack()))
    packed: T = entry[1]
    return packed


def clear() -> None:
    """Forget every repacked weight."""
    _ENTRIES.clear()


def size() -> int:
    """Number of repacked weights kept."""
    return len(_ENTRIES)


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    version = 0 if tensor.is_inference() else tensor._version
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.dtype, version
