"""Constants: read mapped for the time of one read, never kept; and made."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from qgraph.formats.base import Array
from qgraph.scopes import bodies, nodes

FLOATS = frozenset(
    {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE}
)


SCRATCH_BYTES = 8_000_000
_PAGE = 4096
_local = threading.local()


def open_array(tensor: ir.TensorProtocol, scratch: bool = False) -> Array:
    """The tensor as an array that maps its file only as long as the array lives.

    `ir.ExternalTensor.numpy()` maps the whole file and keeps every page it touched until
    `release()`; a fresh mapping per block of rows gives the pages back with the block.

    scratch: read a small tensor into this thread's buffer instead; the array is then good until
        the next such read. One system call into warm memory is cheaper than many page faults.
    """
    if not isinstance(tensor, ir.ExternalTensor) or tensor.dtype.bitwidth < 8 or not tensor.size:
        return tensor.numpy()
    dtype = tensor.dtype.numpy().newbyteorder("<")
    read = scratch and tensor.nbytes <= SCRATCH_BYTES
    data = _read(tensor) if read else _mapped(tensor)
    return data.view(dtype).reshape(tensor.shape.numpy())


def open_bytes(tensor: ir.TensorProtocol) -> Array:
    """The tensor's bytes as stored, uint8, flat; mapped only as long as the array lives."""
    if not isinstance(tensor, ir.ExternalTensor) or not tensor.size:
        return np.frombuffer(tensor.tobytes(), np.uint8)
    return _mapped(tensor)


def scratch_bytes(size: int) -> Array:
    """`size` (up to SCRATCH_BYTES) bytes of this thread's buffer, uint8, good until the next call.

    It starts on a page: x86 copies between files and memory 3 times slower where the target lies
    up to 64 bytes behind the source within their pages, as a tensor's own address often does.
    """
    if not hasattr(_local, "scratch"):
        whole = np.empty(SCRATCH_BYTES + _PAGE, np.uint8)
        _local.scratch = whole[-whole.ctypes.data % _PAGE :]
    found: Array = _local.scratch[:size]
    return found


def _read(tensor: ir.ExternalTensor) -> Array:
    data = scratch_bytes(tensor.nbytes)
    with open(tensor.path, "rb", buffering=0) as file:
        file.seek(tensor.offset or 0)
        if file.readinto(data.data) != tensor.nbytes:
            return _mapped(tensor)
    return data


def _mapped(tensor: ir.ExternalTensor) -> Array:
    offset = tensor.offset or 0
    start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    with open(tensor.path, "rb", buffering=0) as file:
        length = offset - start + tensor.nbytes
        mapped = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_READ, offset=start)
    return np.frombuffer(mapped, np.uint8, tensor.nbytes, offset - start)


def release(tensor: ir.TensorProtocol | None) -> None:
    """Give back the mapping that an external tensor holds, if any."""
    if isinstance(tensor, ir.ExternalTensor) and tensor.raw is not None:
        with contextlib.suppress(BufferError):  # a session reads it still: who closes it does so
            tensor.release()


def small_ints(value: ir.Value | None, limit: int = 4096) -> list[int] | None:
    """The elements of a constant integer value, or None if it is no small constant."""
    tensor = None if value is None else value.const_value
    if tensor is None or tensor.size > limit or not tensor.dtype.is_integer():
        return None
    return [int(item) for item in np.atleast_1d(tensor.numpy()).reshape(-1)]


def scalar(value: ir.Value | None) -> float | None:
    """The one element of a constant, or None."""
    tensor = None if value is None else value.const_value
    if tensor is None or tensor.size != 1:
        return None
    item: Any = tensor.numpy().reshape(-1)[0]
    return float(item)


def from_bytes(
    data: bytes, dtype: ir.DataType, dims: Sequence[int], name: str = ""
) -> ir.TensorProtocol:
    """A tensor of any type and the shape `dims` that holds `data`, as it is stored."""
    proto = onnx.TensorProto(name=name, data_type=dtype.value, dims=dims, raw_data=data)
    return ir.serde.TensorProtoTensor(proto)


def constant_value(name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """A value that holds a tensor, with its shape and type: an initializer, once a graph has it."""
    return ir.Value(
        name=name,
        shape=ir.Shape(tensor.shape.numpy()),
        type=ir.TensorType(tensor.dtype),
        const_value=tensor,
    )


def is_read(value: ir.Value) -> bool:
    """Whether a node reads a value, or the graph gives it."""
    return bool(value.uses()) or value.is_graph_output()


def drop_constant(value: ir.Value) -> None:
    """Remove an initializer that nobody reads."""
    if value.is_initializer() and not is_read(value) and not value.is_graph_input():
        graph = value.graph
        assert graph is not None and value.name is not None
        del graph.initializers[value.name]


def let_go(node: ir.Node) -> None:
    """Let a node that is to be removed read nothing, nor its bodies; constants of it alone go.

    Nodes in the bodies of a removed node would stay readers of values outside.
    """
    for each in (node, *(inner for body in bodies(node) for inner in nodes(body))):
        for at, value in enumerate(each.inputs):
            each.replace_input_with(at, None)
            if value is not None:
                drop_constant(value)
