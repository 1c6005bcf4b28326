"""Where every tensor of a model goes when it is saved: into the .onnx, or at which offset.

Decided before anything is written. Tensors that have the same bytes by construction (one part
of one quantized weight, one extent of one input file, one array) are stored once.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir

from qgraph.formats.base import Array
from qgraph.out_file import OutFile
from qgraph.quant_tensor import QuantTensor

INLINE_BYTES = 1024
"""Tensors of up to this size stay inside the .onnx: tables of 256 floats are among them."""
INLINE_SHAPE_BYTES = 65_536
"""So do integers of rank 0 and 1 of up to this size: shape inference reads them."""
PAGE_BYTES = 4096
LARGE_BYTES = 1_000_000
"""From this size on a tensor starts on a page, so that ONNX Runtime can map it."""
ALIGNMENT = 64
"""Other offsets: a cache line, the widest vector load."""


class Extent(NamedTuple):
    """A run of bytes in a file."""

    offset: int
    length: int


class Slot:
    """The place of a tensor's bytes: `extent` of the data file, or `inline`."""

    def __init__(self, tensor: ir.TensorProtocol, offset: int) -> None:
        self.tensor = tensor
        self.extent = Extent(offset, tensor.nbytes)
        self.inline = bytearray(tensor.nbytes) if stays_inline(tensor) else None

    def put(self, file: OutFile, start: int, data: Array | bytes | memoryview) -> memoryview:
        """Store `data` from byte `start` of the tensor on; returns the bytes stored.

        Raises:
            ValueError: the tensor has fewer bytes.
        """
        if isinstance(data, np.ndarray):
            data = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
        flat = memoryview(data)
        if start + len(flat) > self.extent.length:
            raise ValueError(
                f"{self.tensor.name}: {start + len(flat)} bytes where shape {self.tensor.shape} "
                f"and type {self.tensor.dtype} take {self.extent.length}"
            )
        if self.inline is None:
            file.write_at(self.extent.offset + start, flat)
        else:
            self.inline[start : start + len(flat)] = flat
        return flat


class Plan:
    """The slots of a model's tensors. Strings have none: they can only lie in the .onnx.

    distinct: the slots, in the order of the data file.
    size: the bytes of the data file.
    """

    def __init__(self, tensors: Iterable[ir.TensorProtocol]) -> None:
        self.tensors = [t for t in tensors if t.dtype != ir.DataType.STRING]
        self.size = 0
        self._slots: dict[Hashable, Slot] = {}
        self._by_id: dict[int, Slot] = {}
        real_path = functools.cache(os.path.realpath)  # a system call for each folder of a path
        for tensor in self.tensors:
            key = _identity(tensor, real_path)
            if key not in self._slots:
                self._slots[key] = self._add(tensor)
            self._by_id[id(tensor)] = self._slots[key]

    @property
    def distinct(self) -> list[Slot]:
        """Every slot once."""
        return list(self._slots.values())

    def slot(self, tensor: ir.TensorProtocol) -> Slot:
        """The slot of a planned tensor.

        Raises:
            ValueError: the tensor was not planned: the model was changed in between.
        """
        if id(tensor) not in self._by_id:
            raise ValueError(f"tensor {tensor.name} came into the model after its data was written")
        return self._by_id[id(tensor)]

    def stored(
        self, tensor: ir.TensorProtocol, name: str, folder: str | os.PathLike[str], location: str
    ) -> ir.TensorProtocol:
        """`tensor` as the saved model has it; what is not inline points into `location`."""
        if tensor.dtype == ir.DataType.STRING:
            return tensor
        slot = self.slot(tensor)
        if slot.inline is not None:
            return in_memory(tensor, name, bytes(slot.inline))
        return ir.ExternalTensor(
            location,
            slot.extent.offset,
            slot.extent.length,
            tensor.dtype,
            shape=ir.Shape(tensor.shape.numpy()),
            name=name,
            doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
            base_dir=folder,
        )

    def loaded(self, tensor: ir.TensorProtocol, name: str, data_file: Path) -> ir.TensorProtocol:
        """`tensor` with its bytes in memory, read back from `data_file`."""
        slot = self.slot(tensor)
        if slot.inline is not None:
            return in_memory(tensor, name, bytes(slot.inline))
        with data_file.open("rb") as file:
            file.seek(slot.extent.offset)
            return in_memory(tensor, name, file.read(slot.extent.length))

    def _add(self, tensor: ir.TensorProtocol) -> Slot:
        if stays_inline(tensor):
            return Slot(tensor, 0)
        step = PAGE_BYTES if tensor.nbytes >= LARGE_BYTES else ALIGNMENT
        slot = Slot(tensor, -(-self.size // step) * step)
        self.size = sum(slot.extent)
        return slot


def stays_inline(tensor: ir.TensorProtocol) -> bool:
    """Whether the .onnx holds the tensor itself."""
    if tensor.nbytes <= INLINE_BYTES:
        return True
    integer = tensor.dtype in (ir.DataType.INT32, ir.DataType.INT64)
    return integer and len(tensor.shape) <= 1 and tensor.nbytes <= INLINE_SHAPE_BYTES


def in_memory(tensor: ir.TensorProtocol, name: str, data: bytes) -> ir.TensorProtocol:
    """A tensor like `tensor` that holds `data`."""
    proto = onnx.TensorProto(
        name=name,
        data_type=tensor.dtype.value,
        dims=tensor.shape.numpy(),
        raw_data=data,
        doc_string=tensor.doc_string or None,
    )
    result = ir.serde.TensorProtoTensor(proto)
    result.metadata_props.update(tensor.metadata_props)
    return result


def _identity(tensor: ir.TensorProtocol, real_path: Callable[[str], str]) -> Hashable:
    if isinstance(tensor, QuantTensor):
        return "quantized", id(tensor.source), tensor.layout, tensor.part
    if isinstance(tensor, ir.ExternalTensor):
        return "file", real_path(tensor.path), tensor.offset or 0, tensor.nbytes
    return "memory", id(tensor)
