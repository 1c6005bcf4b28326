"""The constants behind a DequantizeLinear, read through the view of the linear that uses them.

A view is affine in the codes' memory: element (row, column) of `[N, K]` lies at
`offset + row·down + column·right`. To find its scale, the codes' axes are merged to three,
[before, along, after], `along` being the axis of the scales; N and K each lie on one of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from qgraph.constants import open_array, open_bytes
from qgraph.formats.base import Array
from qgraph.formats.packing import unpack_bits
from qgraph.view import View

BEFORE, ALONG, AFTER = 0, 1, 2
SIGNED = (ir.DataType.INT2, ir.DataType.INT4, ir.DataType.INT8)
UNSIGNED = (ir.DataType.UINT2, ir.DataType.UINT4, ir.DataType.UINT8)

Index: TypeAlias = tuple[int, int, int]
"""A length, a stride or a position on each of the three axes."""
Move: TypeAlias = tuple[int, int]
"""How rows or columns move: on which axis, and by how much each."""


class NoGrid(Exception):
    """The scales make no grid of groups along K: `args[0]` says what was found."""


@dataclasses.dataclass(frozen=True, eq=False)
class QdqWeight:
    """Codes, scales and zero points of one DequantizeLinear, as one view `[n, k]` shows them.

    block: codes per scale along the scales' axis; 0 where each index has its own scale.
    offset, down, right: where the view's elements lie in the codes.
    axes: the codes' axes merged to [before, along, after]. first: the view's first element there.
    by_row, by_column: how the view moves on those axes; None for a single row or column.
    """

    codes: ir.TensorProtocol
    scales: ir.TensorProtocol
    zeros: ir.TensorProtocol | None
    block: int
    n: int
    k: int
    offset: int
    down: int
    right: int
    axes: Index
    first: Index
    by_row: Move | None
    by_column: Move | None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.codes.dtype.bitwidth

    @property
    def key(self) -> Hashable:
        """Equal for two weights that read the same constants in the same way."""
        constants = tuple(id(tensor) for tensor in (self.codes, self.scales, self.zeros))
        view = (self.n, self.k, self.offset, self.down, self.right)
        return (*constants, self.block, self.axes, *view)

    @property
    def span(self) -> int:
        """Columns that share one scale: 0 for the whole row.

        Raises:
            NoGrid: neighbouring columns have scales of their own.
        """
        if self.scales.size == 1 or self.by_column is None:
            return 0
        axis, step = self.by_column
        if axis != ALONG:
            if self.block:
                raise NoGrid("its scales run in blocks along the output channels")
            return 0
        if not self.block or step > 1:
            raise NoGrid("it has one scale for each input channel")
        start = self.first[ALONG]
        if start // self.block == (start + self.k - 1) // self.block:
            return 0
        return math.gcd(start, self.block)

    def read_codes(self, start: int, stop: int) -> Array:
        """Rows `start:stop` as stored, int8 or uint8 `[stop - start, k]`."""
        shape, steps = (stop - start, self.k), (self.down, self.right)
        return _window(self.codes, self.offset + start * self.down, shape, steps)

    def read_scales(self, start: int, stop: int, group: int) -> Array:
        """Scales of rows `start:stop` in groups of `group` columns (0: one), `[…, nb]`."""
        return self._grid(open_array(self.scales), start, stop, group)

    def read_zeros(self, start: int, stop: int, group: int) -> Array | None:
        """Zero points likewise, int8 or uint8; None where there are none."""
        if self.zeros is None:
            return None
        return self._grid(read_all(self.zeros), start, stop, group)

    def _grid(self, values: Array, start: int, stop: int, group: int) -> Array:
        """`[stop - start, nb]` of scales or zero points of any granularity."""
        before, along, after = self.axes
        count = -(-self.k // group) if group else 1
        index: list[Array] = [np.asarray(position) for position in self.first]
        if self.by_column is not None:
            axis, step = self.by_column
            index[axis] = index[axis] + np.arange(count)[None, :] * (group * step)
        if self.by_row is not None:
            axis, step = self.by_row
            index[axis] = index[axis] + np.arange(start, stop)[:, None] * step
        if values.size == 1:
            spread = np.broadcast_to(values.reshape(1, 1, 1), self.axes)
        elif self.block:
            spread = values.reshape(before, -(-along // self.block), after)
            index[ALONG] = index[ALONG] // self.block
        else:
            spread = np.broadcast_to(values.reshape(1, along, 1), self.axes)
        found = np.broadcast_to(spread[tuple(index)], (stop - start, count))
        return np.ascontiguousarray(found)


def locate(
    codes: ir.TensorProtocol,
    scales: ir.TensorProtocol,
    zeros: ir.TensorProtocol | None,
    axis: int,
    block: int,
    view: View,
) -> QdqWeight:
    """Find N and K among the axes of the codes.

    Raises:
        NoGrid: the scales fit no axis, or N or K runs over several axes of the codes.
    """
    dims = tuple(int(d) for d in codes.shape.numpy())
    if not codes.size:
        raise NoGrid(f"it has no elements: {list(dims)}")
    if scales.size == 1:
        axis, block = 0, 0
    axis %= len(dims)
    axes = (math.prod(dims[:axis]), dims[axis], math.prod(dims[axis + 1 :]))
    wanted = axes[0] * -(-axes[1] // block) * axes[2] if block else axes[1]
    if scales.size not in (1, wanted) or (zeros is not None and zeros.size != scales.size):
        raise NoGrid(f"its scales {list(scales.shape.numpy())} fit no axis of {list(dims)}")
    (n, k), strides, offset = view.signature(dims)[:3]
    left = list(strides)
    down = left.pop(0) if n > 1 else 0
    right = left.pop(0) if k > 1 else 0
    first = np.unravel_index(offset, axes)
    start: Index = (int(first[0]), int(first[1]), int(first[2]))
    by_row, by_column = (
        _move(step, axes) if scales.size > 1 and length > 1 else None
        for step, length in ((down, n), (right, k))
    )
    last = list(start)
    for move, length in ((by_row, n), (by_column, k)):
        if move is not None:
            last[move[0]] += move[1] * (length - 1)
    if any(position >= length for position, length in zip(last, axes, strict=True)):
        raise NoGrid("rows or columns of the weight run over several axes of its codes")
    return QdqWeight(
        codes, scales, zeros, block, n, k, offset, down, right, axes, start, by_row, by_column
    )


def _move(step: int, axes: Index) -> Move:
    """The axis on which elements `step` apart lie, and how far apart there."""
    for at, unit in ((BEFORE, axes[1] * axes[2]), (ALONG, axes[2]), (AFTER, 1)):
        if step >= unit and step % unit == 0:
            return at, step // unit
    raise NoGrid("rows or columns of the weight run backwards")


def read_all(tensor: ir.TensorProtocol) -> Array:
    """All codes of a small tensor, one byte each: int8 or uint8, flat."""
    bits = tensor.dtype.bitwidth
    codes = open_bytes(tensor) if bits == 8 else unpack_bits(open_bytes(tensor), bits)
    return _typed(codes[: tensor.size], tensor.dtype)


def _window(
    tensor: ir.TensorProtocol, first: int, shape: tuple[int, int], steps: tuple[int, int]
) -> Array:
    """A strided window of a tensor of codes, contiguous, one byte each: int8 or uint8.

    Codes below one byte are unpacked line by line where lines start at whole bytes.
    """
    per_byte = 8 // tensor.dtype.bitwidth
    (n, k), (down, right) = shape, steps
    by_row = right == 1 or n == 1
    lines, other, length = (n, down, k) if by_row else (k, right, n)
    whole = (first % per_byte, other % per_byte) == (0, 0) and (right if by_row else down) == 1
    if per_byte == 1 or not whole:
        flat = open_bytes(tensor) if per_byte == 1 else read_all(tensor).view(np.uint8)
        window = np.ascontiguousarray(_strided(flat, first, shape, steps))
        return window.view(np.int8) if tensor.dtype in SIGNED else window
    packed = _strided(
        open_bytes(tensor),
        first // per_byte,
        (lines, -(-length // per_byte)),
        (other // per_byte, 1),
    )
    codes = _typed(unpack_bits(packed, tensor.dtype.bitwidth)[:, :length], tensor.dtype)
    return np.ascontiguousarray(codes if by_row else codes.T)


def _strided(flat: Array, first: int, shape: tuple[int, int], steps: tuple[int, int]) -> Array:
    """A window of an array of bytes; numpy checks that it lies inside."""
    return np.ndarray(shape, flat.dtype, flat, first, steps)


def _typed(codes: Array, dtype: ir.DataType) -> Array:
    """uint8 codes as int8, two's complement of fewer bits widened, where the type is signed."""
    if dtype not in SIGNED:
        return codes
    if dtype.bitwidth < 8:
        half = np.uint8(1 << (dtype.bitwidth - 1))
        codes = (codes ^ half) - half
    return codes.view(np.int8)
