"""The bytes of an .onnx file, a piece at a time, so that large tensors are never in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

import onnx
import onnx_ir as ir

from qgraph import varint
from qgraph.data_file import Extent
from qgraph.out_file import OutFile

Piece: TypeAlias = bytes | Extent
"""Bytes, or a run of the data file that stands here."""

# Field numbers of onnx.proto with wire type 2 (length-delimited).
_MODEL_GRAPH = bytes([7 << 3 | 2])
_GRAPH_INITIALIZER = bytes([5 << 3 | 2])
_TENSOR_RAW_DATA = bytes([9 << 3 | 2])
_COPY_BYTES = 1_000_000
_EXTERNAL = onnx.TensorProto.EXTERNAL


def alone(model: ir.Model) -> list[Piece]:
    """The model as it is: of external tensors, only where they are."""
    return [ir.serde.serialize_model(model).SerializeToString(deterministic=True)]


def with_data_inside(model: ir.Model) -> list[Piece]:
    """The model with the external initializers of its main graph put into the file.

    Protobuf's wire format, written by hand only around them: a length, then the content.
    """
    proto = ir.serde.serialize_model(model)
    external = [t for t in proto.graph.initializer if t.data_location == _EXTERNAL]
    small = [t for t in proto.graph.initializer if t.data_location != _EXTERNAL]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(small)
    graph: list[Piece] = [proto.graph.SerializeToString(deterministic=True)]
    for tensor in external:
        graph += _initializer(tensor)
    proto.ClearField("graph")
    head = proto.SerializeToString(deterministic=True)
    return [head, _MODEL_GRAPH + varint.encode(size(graph)), *graph]


def size(pieces: list[Piece]) -> int:
    """Bytes of all pieces."""
    return sum(piece.length if isinstance(piece, Extent) else len(piece) for piece in pieces)


def write(pieces: list[Piece], data: Path, file: OutFile) -> None:
    """Write `pieces` to `file`, runs of the data file through a small buffer."""
    at = 0
    with data.open("rb") as source:
        for piece in pieces:
            for chunk in _chunks(piece, source):
                file.write_at(at, chunk)
                at += len(chunk)


def _chunks(piece: Piece, source: BinaryIO) -> Iterator[bytes]:
    if isinstance(piece, bytes):
        yield piece
        return
    source.seek(piece.offset)
    for start in range(0, piece.length, _COPY_BYTES):
        yield source.read(min(_COPY_BYTES, piece.length - start))


def _initializer(tensor: onnx.TensorProto) -> Iterator[Piece]:
    place = {
        entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"
    }
    data = Extent(place["offset"], place["length"])
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")
    head = (
        tensor.SerializeToString(deterministic=True) + _TENSOR_RAW_DATA + varint.encode(data.length)
    )
    yield _GRAPH_INITIALIZER + varint.encode(len(head) + data.length) + head
    yield data
