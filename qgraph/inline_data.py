"""Large tensors inside an .onnx file, referred to by their place in it instead of parsed.

A parsed protobuf holds a copy of every weight for as long as the model lives. Here the wire
format (https://protobuf.dev/programming-guides/encoding/) is followed only as far as lengths
go: large `raw_data` stays where it is, as external data whose file is the .onnx file itself.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import Any, TypeAlias

import onnx

from qgraph import varint
from qgraph.external_data import holds_tensors

LARGE = 1 << 20
"""Bytes from which on a tensor's data stays in the file."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NUMBERS = {field.name: field.number for field in onnx.TensorProto.DESCRIPTOR.fields}
_PLACES = {_NUMBERS["external_data"], _NUMBERS["data_location"]}
_Piece: TypeAlias = bytes | range
"""New bytes, or the place of bytes that stay as they are."""


class _UnusualError(Exception):
    """The bytes are no message that this reader takes apart: the plain parser decides."""


def read(file: str, large: int = LARGE) -> bytes:
    """The bytes of the model in `file`, its large tensors external data of that same file.

    Where nothing is large, or the file is not as expected, these are the bytes of the file.
    """
    with (
        open(file, "rb") as stream,
        mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        whole = range(len(data))
        pieces: list[_Piece] = [whole]
        # Files with hard links are not mapped (see external_data), and names are UTF-8 in ONNX.
        if os.fstat(stream.fileno()).st_nlink == 1:
            with contextlib.suppress(_UnusualError, UnicodeEncodeError):
                name = os.path.basename(file).encode().decode()
                pieces = _message(data, whole, onnx.ModelProto.DESCRIPTOR, name, large)
        return b"".join(p if isinstance(p, bytes) else data[p.start : p.stop] for p in pieces)


def _message(data: mmap.mmap, place: range, kind: Any, name: str, large: int) -> list[_Piece]:
    """The pieces that make up the message of type `kind` at `place`."""
    pieces: list[_Piece] = []
    done = place.start
    seen: set[int] = set()
    for number, begin, value in _fields(data, place):
        field = kind.fields_by_number.get(number)
        inner = None if field is None else field.message_type
        if inner is None or not holds_tensors(inner.full_name):
            continue
        if not field.is_repeated and number in seen:
            # Parsers merge two messages of one field; data and a place do not merge.
            raise _UnusualError
        seen.add(number)
        if len(value) < large:
            continue
        if inner.full_name == "onnx.TensorProto":
            new = _tensor(data, value, name, large)
        else:
            new = _message(data, value, inner, name, large)
        pieces += [
            range(done, begin),
            varint.encode(number << 3 | _BYTES),
            varint.encode(_size(new)),
            *new,
        ]
        done = value.stop
    return [*pieces, range(done, place.stop)]


def _size(pieces: list[_Piece]) -> int:
    return sum(map(len, pieces))


def _tensor(data: mmap.mmap, place: range, name: str, large: int) -> list[_Piece]:
    """A tensor whose data, if large, is replaced by its place in the file."""
    fields = list(_fields(data, place))
    raw = [field for field in fields if field[0] == _NUMBERS["raw_data"]]
    if len(raw) != 1 or len(raw[0][2]) < large or any(field[0] in _PLACES for field in fields):
        return [place]
    _, begin, value = raw[0]
    reference = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, text in (("location", name), ("offset", value.start), ("length", len(value))):
        reference.external_data.add(key=key, value=str(text))
    return [
        range(place.start, begin),
        range(value.stop, place.stop),
        reference.SerializeToString(),
    ]


def _fields(data: mmap.mmap, place: range) -> Iterator[tuple[int, int, range]]:
    """Each field of a message: its number, where its key begins, the place of its value."""
    at = place.start
    while at < place.stop:
        begin = at
        key, at = _read_varint(data, at, place.stop)
        wire = key & 7
        if wire == _VARINT:
            size = _read_varint(data, at, place.stop)[1] - at
        elif wire == _BYTES:
            size, at = _read_varint(data, at, place.stop)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise _UnusualError
        if at + size > place.stop:
            raise _UnusualError
        yield key >> 3, begin, range(at, at + size)
        at += size


def _read_varint(data: mmap.mmap, at: int, stop: int) -> tuple[int, int]:
    """A number and where it ends."""
    try:
        value, size = varint.decode(data[at : min(at + varint.LONGEST, stop)])
    except ValueError:
        raise _UnusualError from None
    return value, at + size
