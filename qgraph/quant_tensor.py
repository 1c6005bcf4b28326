"""Quantized weights that are computed when they are written, block of rows by block of rows.

A `QuantSource` yields quantized rows; a `QuantTensor` is one part of it (codes, scales or
zeros) in one layout, as an onnx_ir tensor. Lowering swaps the layout without touching data;
the writer makes one pass over a source and fills all its parts.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np
import onnx
import onnx_ir as ir

from qgraph.formats.base import Array, Format, Layout, Part, PartSpec, QuantizedWeight

BLOCK_BYTES = 64_000_000
"""The most float32 bytes of a weight that are in memory at once, over all threads."""
ROW_STEP = 8
_PIECE = 1 << 16


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far some rows, read back from storage, are from what their source says.

    worst: the largest |w − ŵ| divided by the bound on it; up to 1 is right.
    error_sq, norm_sq: Σ(w − ŵ)² and Σw², for the relative error of the weight.
    """

    worst: float
    error_sq: float
    norm_sq: float


def square_sum(array: Array) -> float:
    """Σ a², in float64 piece by piece: the squares of small float32 numbers underflow."""
    flat = array.reshape(-1)
    pieces = (flat[at : at + _PIECE].astype(np.float64) for at in range(0, len(flat), _PIECE))
    return float(sum(piece @ piece for piece in pieces))


class QuantSource(ABC):
    """Where the quantized rows of one weight `[n, k]` come from."""

    format: Format
    n: int
    k: int
    scale_dtype: ir.DataType
    name: str
    output_error: float | None = None
    """‖(W − Ŵ)Xᵀ‖/‖WXᵀ‖ on the inputs X of calibration, where a solver measured it."""

    @abstractmethod
    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`, quantized; safe to call from several threads."""

    @abstractmethod
    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """Compare rows `start:stop` as read back from storage with the source's own truth."""

    def release(self) -> None:  # noqa: B027  (most sources hold nothing)
        """Give back the memory that mapped input files hold; `block` works again after it."""

    @property
    def row_step(self) -> int:
        """Blocks of rows start at multiples of it: of 8, and of what the format wants.

        Types below one byte, which ONNX packs flat, then start each block at a whole byte.
        """
        return math.lcm(ROW_STEP, self.format.row_step(self.k))

    def block_rows(self, limit: int = BLOCK_BYTES) -> int:
        """Rows per block of at most `limit` bytes of float32, and at least `row_step`."""
        step = self.row_step
        return max(step, min(self.n + step - 1, limit // (4 * self.k)) // step * step)

    def blocks(self, limit: int = BLOCK_BYTES) -> Iterator[tuple[int, int]]:
        """The (start, stop) of each block of rows."""
        step = self.block_rows(limit)
        for start in range(0, self.n, step):
            yield start, min(start + step, self.n)

    def parts(self, layout: Layout) -> Mapping[Part, PartSpec]:
        """Shape and type of each part in `layout`."""
        return _parts(self.format, self.n, self.k, self.scale_dtype, layout)


@functools.lru_cache(maxsize=1024)  # asked several times for each weight; few have a shape alone
def _parts(
    fmt: Format, n: int, k: int, scale_dtype: ir.DataType, layout: Layout
) -> Mapping[Part, PartSpec]:
    return MappingProxyType(fmt.parts(n, k, scale_dtype, layout))


class QuantTensor(ir.TensorProtocol):
    """One part of a `QuantSource` in one layout."""

    def __init__(self, source: QuantSource, part: Part, layout: Layout, name: str) -> None:
        self.source = source
        self.part = part
        self.layout = layout
        self.spec = source.parts(layout)[part]
        self.name: str | None = name
        self.doc_string: str | None = None
        self.shape: ir.ShapeProtocol = ir.Shape(self.spec.shape)
        self.dtype: ir.DataType = self.spec.dtype
        self.raw: Any = source
        self.metadata_props: MutableMapping[str, str] = {}
        self.meta: MutableMapping[str, Any] = {}

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.spec.size

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.spec.nbytes

    def tofile(self, file: BinaryIO) -> None:
        """Write the bytes of this part, one block of rows at a time.

        Where rows are columns, the part is put together in memory.
        """
        turned = []
        for start, stop in self.source.blocks():
            if start and not self.spec.rows:
                break  # a part of the whole weight came with the first block
            packed = self.source.format.pack(self.source.block(start, stop), self.layout)
            if self.spec.axis:
                turned.append(packed[self.part])
            else:
                file.write(np.ascontiguousarray(packed[self.part]).tobytes())
        if turned:
            file.write(np.concatenate(turned, axis=self.spec.axis).tobytes())
        self.source.release()

    def tobytes(self) -> bytes:
        """All bytes of this part: for small tensors and for other tools."""
        buffer = io.BytesIO()
        self.tofile(buffer)
        return buffer.getvalue()

    def numpy(self) -> Array:
        """The whole part as an array (sub-byte types unpacked, as onnx_ir has them)."""
        proto = onnx.TensorProto(data_type=self.dtype.value, dims=list(self.spec.shape))
        proto.raw_data = self.tobytes()
        return ir.serde.deserialize_tensor(proto).numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, *, stream: Any = ...) -> Any:
        return self.numpy().__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.numpy().__dlpack_device__()
