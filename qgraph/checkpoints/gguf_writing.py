"""Writing a GGUF file: its header first, then tensors as they come, under a temporary name."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from qgraph.checkpoints.base import Entry, FloatTensor, Outgoing
from qgraph.checkpoints.gguf_blocks import BlockType
from qgraph.checkpoints.gguf_description import Description, describe, encoded_string, encoded_value
from qgraph.checkpoints.gguf_encoding import NoType, encode
from qgraph.checkpoints.gguf_entries import GgufFloats
from qgraph.checkpoints.gguf_file import ALIGNMENT, MAGIC, PLAIN
from qgraph.errors import InputError
from qgraph.formats.base import Array
from qgraph.out_file import OutFile, abandoned
from qgraph.quant_tensor import BLOCK_BYTES

_VERSION = 3
FILE_TYPES = {
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14,
    "Q5_K": 16, "Q6_K": 18, "IQ4_NL": 25, "MXFP4": 38,
}  # fmt: skip
"""`general.file_type` of files that are mostly of one type."""
_NUMBERS = {dtype: number for number, (_, dtype) in PLAIN.items()}
TypeOf = Callable[[Entry], BlockType]


class _Blocks(NamedTuple):
    """A quantized weight; `places`: the row of the file that each of its rows is."""

    name: str
    entry: Entry
    kind: BlockType
    places: Array | None

    @property
    def number(self) -> int:
        return self.kind.number

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def width(self) -> int:
        """Bytes of a row."""
        return self.entry.k // self.kind.size * self.kind.nbytes

    @property
    def nbytes(self) -> int:
        return self.entry.total_rows * self.width

    def pieces(self) -> Iterator[tuple[int, Array]]:
        """What is written, with the place of its first byte."""
        if self.places is not None:
            yield 0, in_order(encoded(self.entry, self.kind), self.places)
        else:
            for start, stop in self.entry.blocks():
                yield start * self.width, encode(self.entry, self.kind, start, stop)
        self.entry.check_written()


class _Floats(NamedTuple):
    """A float tensor, float32 where it is a vector, as llama.cpp wants those.

    added: what the file's numbers are more than the tensor's.
    stored: whether it lies in a GGUF file of this architecture, from which it is copied.
    """

    name: str
    tensor: FloatTensor
    places: Array | None
    added: float
    stored: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        own = self.tensor.dtype
        wide = own not in _NUMBERS or (len(self.shape) < 2 and not self.stored)
        return np.dtype(np.float32) if wide else own

    @property
    def number(self) -> int:
        return _NUMBERS[self.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[tuple[int, Array]]:
        """What is written, with the place of its first byte."""
        source: FloatTensor = self.tensor
        if isinstance(source, GgufFloats) and self.stored:
            source = source.stored
        elif self.places is not None or self.added:
            rows = self.tensor.rows(0, self.shape[0]).astype(self.dtype, copy=False)
            yield 0, in_order(rows + self.dtype.type(self.added), self.places)
            return
        count = self.shape[0] if self.shape else 1
        width = self.nbytes // count
        step = max(1, BLOCK_BYTES // width)
        for start in range(0, count, step):
            rows = source.rows(start, min(start + step, count))
            yield start * width, rows.astype(self.dtype, copy=False)


_Item: TypeAlias = _Blocks | _Floats


def in_order(rows: Array, places: Array | None) -> Array:
    """Rows put at their places."""
    if places is None:
        return rows
    found = np.empty_like(rows)
    found[places] = rows
    return found


def encoded(entry: Entry, kind: BlockType) -> Array:
    """All rows of a weight as blocks, u8 `[N, K / size · nbytes]`, made block of rows by block."""
    found = np.empty((entry.n, entry.k // kind.size * kind.nbytes), np.uint8)
    for start, stop in entry.blocks():
        found[start:stop] = encode(entry, kind, start, stop)
    return found


def save_file(
    out: Path,
    outgoing: Outgoing,
    type_of: TypeOf,
    progress: Callable[[int, int], None] | None,
) -> list[Path]:
    """See `CheckpointLayout.save`; `type_of` raises `NoType` for weights that have none.

    Raises:
        InputError: `out` exists; the model, its tokenizer or a tensor has no place in GGUF; the
            disk is full.
    """
    out = Path(os.path.abspath(out))
    if os.path.lexists(out):
        raise InputError(f"{out} exists: choose another file, or remove it first")
    if not out.parent.is_dir():
        raise InputError(f"{out.parent} is no folder: make it first")
    about = describe(outgoing)
    items = _items(outgoing, about, type_of)
    fields = {**about.fields, "general.file_type": encoded_value(_file_type(items))}
    header, offsets = _header(fields, items)
    for left in abandoned(out.parent, out.name):
        left.unlink(missing_ok=True)
    file = OutFile(out.parent, out.name)
    try:
        file.allocate(offsets[-1])
        file.write_at(0, header)
        for item, at in zip(items, offsets, strict=False):
            for first, data in item.pieces():
                file.write_at(
                    at + first, np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
                )
            if progress is not None:
                progress(at + item.nbytes, offsets[-1])
        file.sync()
        file.rename(out)
    except BaseException:
        file.discard()
        raise
    return [out]


def _items(outgoing: Outgoing, about: Description, type_of: TypeOf) -> list[_Item]:
    """Every tensor under GGUF's name, in the order of the file that the new one is to be like.

    Raises:
        InputError: one has no place, no type, another shape than it should, or the name of another,
            or one is missing.
    """
    found: dict[str, _Item] = {}
    everything: list[Entry | FloatTensor] = [*outgoing.entries, *outgoing.floats]
    for each in everything:
        name = about.place(each.name, each.shape)
        if name in found:
            raise InputError(f"two tensors are called {name}: one of them must be renamed")
        places = about.names.order(name, each.shape[0]) if each.shape else None
        found[name] = (
            _blocks(name, each, places, type_of)
            if isinstance(each, Entry)
            else _floats(name, each, places, about)
        )
    return [found[name] for name in about.ordered(list(found))]


def _blocks(name: str, entry: Entry, places: Array | None, type_of: TypeOf) -> _Blocks:
    try:
        return _Blocks(name, entry, type_of(entry), places)
    except NoType as error:
        raise InputError(f"gguf cannot hold {entry.name}: {error}") from None


def _floats(name: str, tensor: FloatTensor, places: Array | None, about: Description) -> _Floats:
    if tensor.dtype not in _NUMBERS and tensor.dtype != np.float64:
        raise InputError(f"{tensor.name} is {tensor.dtype}, wanted a float type")
    stored = isinstance(tensor, GgufFloats) and tensor.stored.path == about.path
    return _Floats(name, tensor, places, about.names.added(name), stored)


def _file_type(items: list[_Item]) -> int:
    """The type of most bytes of quantized weights."""
    sizes: dict[str, int] = {}
    for item in items:
        if isinstance(item, _Blocks):
            sizes[item.kind.name] = sizes.get(item.kind.name, 0) + item.nbytes
    return FILE_TYPES[max(sizes, key=lambda name: sizes[name])] if sizes else 0


def _header(fields: Mapping[str, bytes], items: list[_Item]) -> tuple[bytes, list[int]]:
    """The bytes in front of the data; where each tensor lies in the file, and where it ends."""
    relative, at = [], 0
    for item in items:
        relative.append(at)
        at += -(-item.nbytes // ALIGNMENT) * ALIGNMENT
    parts = [MAGIC, struct.pack("<IQQ", _VERSION, len(items), len(fields))]
    parts += [encoded_string(key) + value for key, value in fields.items()]
    for item, place in zip(items, relative, strict=True):
        shape = item.shape[::-1] or (1,)
        parts.append(
            encoded_string(item.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        )
        parts.append(struct.pack("<IQ", item.number, place))
    header = b"".join(parts)
    header += bytes(-len(header) % ALIGNMENT)
    return header, [len(header) + place for place in (*relative, at)]
