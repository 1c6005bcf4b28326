"""Quantized weights as they lie in a written data file, read back in blocks of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx_ir as ir

from qgraph.formats.base import Array, Format, Layout, Part, QuantizedWeight
from qgraph.quant_tensor import QuantSource, QuantTensor

SAMPLE_ROWS = 4096
"""The most rows of a weight that are read back, spread evenly."""
_BLOCKED = ("blocks", "sums")
"""Layouts in which smaller blocks than the group's may hold copies of its scale."""
BLOCK_FLOATS = 1 << 18
"""Weights in memory at once per thread: 1 MB of float32, which stays in the cache."""


class WrittenData(Protocol):
    """A data file that was written and not yet renamed.

    tensors: initializer name → the tensor as it will be read back.
    """

    @property
    def path(self) -> Path:
        """The data file."""

    @property
    def tensors(self) -> Mapping[str, ir.TensorProtocol]:
        """Every initializer."""


@dataclasses.dataclass(frozen=True)
class StoredWeight:
    """The parts of one quantized weight as stored.

    name: the initializer that holds the codes.
    parts: each part as it is read back; shape and type are those of `layout`.
    """

    name: str
    source: QuantSource
    layout: Layout
    parts: Mapping[Part, ir.TensorProtocol]

    @property
    def format(self) -> Format:
        """The format of the codes."""
        return self.source.format

    @property
    def block(self) -> int:
        """Elements of a row that share a scale as stored; 0 for the whole row."""
        return self.layout.block if self.layout.kind in _BLOCKED else self.format.group

    def sample(self) -> list[tuple[int, int]]:
        """(start, stop) of the blocks of rows to read: all of them, or evenly spread ones."""
        n, k, unit = self.source.n, self.source.k, self.source.row_step
        step = max(unit, BLOCK_FLOATS // k // unit * unit)
        if n <= max(SAMPLE_ROWS, step):
            return [(start, min(start + step, n)) for start in range(0, n, step)]
        step = max(unit, min(step, SAMPLE_ROWS // 4 // unit * unit))
        starts = np.linspace(0, n - step, SAMPLE_ROWS // step)
        blocks = [int(start) // unit * unit for start in starts]
        last = -(-(n - step) // unit) * unit
        return [*((start, start + step) for start in blocks[:-1]), (last, n)]

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`, unpacked.

        Raises:
            ValueError: a block that is copied to smaller ones has different copies.
        """
        raw = {part: self.typed(part, start, stop) for part in self.parts}
        weight = self.format.unpack(raw, stop - start, self.source.k, self.layout)
        if self.layout.kind in _BLOCKED and self.layout.block != self.format.group:
            packed = self.format.pack(weight, self.layout)
            for part, data in raw.items():
                if packed[part].tobytes() != data.tobytes():
                    raise ValueError(f"the {part} that smaller blocks repeat differ")
        return weight

    def values(self, start: int, stop: int) -> Array:
        """Rows `start:stop` as the float32 `[n, K]` that they stand for."""
        return self.format.dequantize(self.rows(start, stop))

    def addends(self, start: int, stop: int) -> tuple[Array, ...]:
        """Rows `start:stop` as what kernels multiply one by one, see `Format.addends`."""
        return self.format.addends(self.rows(start, stop))

    def raw(self, part: Part, start: int, stop: int) -> Array:
        """The bytes (u8) of rows `start:stop` of a part."""
        spec = self.source.parts(self.layout)[part]
        return read_spans(self.parts[part], spec.spans(start, stop))

    def typed(self, part: Part, start: int, stop: int) -> Array:
        """The same in the part's own type, where bytes alone do not say which float they are."""
        raw = self.raw(part, start, stop)
        dtype = self.source.parts(self.layout)[part].dtype
        return raw.view(dtype.numpy()) if dtype == ir.DataType.BFLOAT16 else raw

    def largest(self) -> float:
        """A bound on |ŵ| over the rows that are read back, from their scales alone."""
        reach = self.format.reach
        scales = (self.rows(start, stop).scales for start, stop in self.sample())
        return max(float(np.abs(found.astype(np.float32)).max()) for found in scales) * reach


def stored_weight(
    names: Mapping[Part, str], tensors: Mapping[Part, QuantTensor], data: WrittenData
) -> StoredWeight:
    """The weight whose parts were written from `tensors`, under `names`."""
    codes = tensors["codes"]
    parts = {part: data.tensors[name] for part, name in names.items()}
    # Codes and scales may serve two layouts: a third part then says which one this is.
    third = [t.layout for part, t in tensors.items() if part not in ("codes", "scales")]
    return StoredWeight(names["codes"], codes.source, (third or [codes.layout])[0], parts)


def read_bytes(tensor: ir.TensorProtocol, start: int, stop: int) -> Array:
    """Bytes `start:stop` (u8) of a tensor, without mapping its file."""
    return read_spans(tensor, [(start, stop)])


def read_spans(tensor: ir.TensorProtocol, spans: Sequence[tuple[int, int]]) -> Array:
    """Runs of bytes (u8) of a tensor, one behind the other, without mapping its file."""
    if not isinstance(tensor, ir.ExternalTensor):
        raw = np.frombuffer(tensor.tobytes(), np.uint8)
        return np.concatenate([raw[slice(*span)] for span in spans])
    first, found = tensor.offset or 0, []
    with open(tensor.path, "rb", buffering=0) as file:
        for start, stop in spans:
            file.seek(first + start)
            found.append(file.read(stop - start))
    return np.frombuffer(b"".join(found), np.uint8)
