"""A GGUF file's header, and the bytes of its tensors.

The layout is ggml's (`docs/gguf.md`, versions 2 and 3, little-endian). Every length that the file
names is checked against what is left of the file, and of the most that a header takes, before
anything is read or allocated, so a header costs no more than a few times its own bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from qgraph.checkpoints.gguf_blocks import BLOCK_TYPES, BlockType
from qgraph.checkpoints.tensors import StoredTensor
from qgraph.errors import InputError

MAGIC = b"GGUF"
ALIGNMENT = 32
_VERSIONS = (2, 3)
_LARGEST_HEADER = 200_000_000  # vocabularies take tens of millions of bytes
_MOST = 1_000_000  # tensors, fields, arrays in an array
_LARGEST_RANK = 4
_DEEPEST = 4  # arrays of arrays
_SMALL = 8  # bytes of what becomes one element of an array or list
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
PLAIN: dict[int, tuple[str, np.dtype[Any]]] = {
    0: ("F32", np.dtype(np.float32)),
    1: ("F16", np.dtype(np.float16)),
    30: ("BF16", np.dtype(ml_dtypes.bfloat16)),
}
"""Types of unquantized tensors, by their number in files."""


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file.

    type: None where it is not quantized.
    shape: rows first, `[N]`, `[N, K]` or `[E, N, K]` (the file lists K first).
    stored: numbers of that shape, or the bytes of its blocks, u8 `[…, K / size · nbytes]`.
    """

    type: BlockType | None
    shape: tuple[int, ...]
    stored: StoredTensor


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """The header of a file: metadata and tensors by name, each in the file's order.

    spans: where a field's type and value lie in the file, by its name: first byte, end.
    """

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    spans: Mapping[str, tuple[int, int]]

    def field(self, name: str) -> Any:
        """A metadata value: a number, a string, a list of strings or an array of numbers.

        Raises:
            InputError: the file has no such field.
        """
        if name not in self.fields:
            raise InputError(f"the GGUF file {self.path} has no field {name}")
        return self.fields[name]

    def number(self, name: str) -> int:
        """A metadata value that is a whole number above 0.

        Raises:
            InputError: it is not there, or something else.
        """
        found = self.field(name)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise InputError(f"{self.path}: the field {name} is {found!r}, wanted a number above 0")
        return found


def read_header(path: Path) -> GgufFile:
    """Read the header of a GGUF file.

    Raises:
        InputError: no GGUF file, a version or byte order that is not read, lengths that do not
            fit the file, tensors of unknown types, of no size, outside the file, in the place of
            another or named twice.
    """
    try:
        with path.open("rb") as file:
            if file.read(4) != MAGIC:
                raise InputError(f"{path} is no GGUF file: wanted {MAGIC!r} at its start")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data).header()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def parts_of(file: GgufFile) -> int:
    """How many files hold the model of which this is one."""
    found = file.fields.get("split.count")
    return found if isinstance(found, int) else 1


class _Place(NamedTuple):
    """What the header says of a tensor; `offset` counts from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type: int
    offset: int


class _Reader:
    """Reads from a mapped file, front to back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at, self.size = path, data, len(MAGIC), len(data)
        self.end = min(self.size, _LARGEST_HEADER)
        self.spans: dict[str, tuple[int, int]] = {}

    def header(self) -> GgufFile:
        version = self.scalar("<u4", "the version")
        if version not in _VERSIONS:
            big = version and version & 0xFFFF == 0
            kind = "big-endian" if big else f"of version {version}"
            raise InputError(f"{self.path} is {kind}: wanted little-endian, version 2 or 3")
        tensors = self.count("tensors", 24)
        fields = self.fields(self.count("metadata fields", 13))
        places = [self.place() for _ in range(tensors)]
        alignment = fields.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise InputError(
                f"{self.path}: general.alignment is {alignment!r}, wanted a power of two"
            )
        found: dict[str, GgufTensor] = {}
        for place in places:
            if place.name in found:
                raise self.error(f"two tensors are named {place.name!r}")
            found[place.name] = self.tensor(place, -(-self.at // alignment) * alignment, alignment)
        self.check_places(found)
        return GgufFile(self.path, fields, found, self.spans)

    def check_places(self, tensors: Mapping[str, GgufTensor]) -> None:
        """Refuse tensors that share bytes."""
        stored = sorted((each.stored for each in tensors.values()), key=lambda each: each.offset)
        for one, other in itertools.pairwise(stored):
            if one.offset + one.nbytes > other.offset:
                raise self.error(f"{other.name!r} lies within {one.name!r}")

    def error(self, text: str) -> InputError:
        return InputError(f"{self.path}: {text}. The file is damaged: download it again")

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self.end - self.at:
            left = self.end - self.at
            raise self.error(f"{what} would take {nbytes} bytes, and {left} are left of the header")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def scalar(self, kind: str, what: str) -> Any:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def count(self, what: str, least: int) -> int:
        """A number of things of at least `least` bytes each."""
        found: int = self.scalar("<u8", f"the number of {what}")
        if found * least > self.end - self.at:
            raise self.error(f"{found} {what} do not fit into its {self.size} bytes")
        if least > _SMALL and found > _MOST:
            raise self.error(f"it has {found} {what}, wanted {_MOST} at most")
        return found

    def string(self, what: str) -> str:
        return self.take(self.count(f"bytes of {what}", 1), what).decode("utf-8", "surrogateescape")

    def fields(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            name = self.string("a field's name")
            if name in found:
                raise self.error(f"the field {name!r} is there twice")
            start = self.at
            found[name] = self.value(self.scalar("<u4", f"the type of {name!r}"), name)
            self.spans[name] = start, self.at
        return found

    def value(self, kind: int, name: str, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string(name)
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], name)
        if kind != _ARRAY or depth == _DEEPEST:
            raise self.error(f"the field {name!r} has the unknown type {kind}")
        kind = self.scalar("<u4", f"the type of {name!r}")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            count = self.count(f"elements of {name!r}", dtype.itemsize)
            return np.frombuffer(self.take(count * dtype.itemsize, name), dtype)
        if kind == _STRING:
            return self.strings(self.count(f"strings of {name!r}", 8), name)
        count = self.count(f"arrays of {name!r}", 12)
        return [self.value(kind, name, depth + 1) for _ in range(count)]

    def strings(self, count: int, name: str) -> list[str]:
        """`count` strings; vocabularies have a hundred thousand."""
        length, found, at, data = struct.Struct("<Q").unpack_from, [], self.at, self.data
        for _ in range(count):
            end = at + 8 + length(data, at)[0] if at + 8 <= self.end else self.end + 1
            if end > self.end:
                raise self.error(f"a string of {name!r} ends beyond the header")
            found.append(data[at + 8 : end].decode("utf-8", "surrogateescape"))
            at = end
        self.at = at
        return found

    def place(self) -> _Place:
        name = self.string("a tensor's name")
        rank = self.scalar("<u4", f"the rank of {name!r}")
        if not 1 <= rank <= _LARGEST_RANK:
            raise self.error(f"{name!r} has {rank} dimensions, wanted 1 to {_LARGEST_RANK}")
        dims = np.frombuffer(self.take(8 * rank, f"the shape of {name!r}"), "<u8").tolist()
        kind = self.scalar("<u4", f"the type of {name!r}")
        return _Place(
            name, tuple(reversed(dims)), kind, self.scalar("<u8", f"the place of {name!r}")
        )

    def tensor(self, place: _Place, start: int, alignment: int) -> GgufTensor:
        """The tensor at `place`, in data that begins at `start`."""
        block = self.block_type(place)
        name, shape = place.name, place.shape
        stored = StoredTensor(name, self.path, np.dtype(np.uint8), shape, start + place.offset)
        size = block.size if block else 1
        if 0 in shape or shape[-1] % size:
            wanted = f"rows of whole blocks of {size}" if size > 1 else "no dimension of 0"
            raise self.error(f"{name!r} has the shape {list(shape)}, wanted {wanted}")
        if block:
            width = shape[-1] // size * block.nbytes
            stored = dataclasses.replace(stored, shape=(*shape[:-1], width))
        else:
            stored = dataclasses.replace(stored, dtype=PLAIN[place.type][1])
        if place.offset % alignment or stored.offset + stored.nbytes > self.size:
            raise self.error(
                f"{name!r} {list(shape)} would take {stored.nbytes} bytes from {stored.offset} on: "
                f"wanted a multiple of {alignment} within the {self.size} bytes of the file"
            )
        return GgufTensor(block, shape, stored)

    def block_type(self, place: _Place) -> BlockType | None:
        if place.type not in PLAIN and place.type not in BLOCK_TYPES:
            known = [label for label, _ in PLAIN.values()] + [t.name for t in BLOCK_TYPES.values()]
            raise InputError(
                f"{self.path}: {place.name!r} has ggml's type number {place.type}, which is not "
                f"read (known: {', '.join(known)})"
            )
        return BLOCK_TYPES.get(place.type)
