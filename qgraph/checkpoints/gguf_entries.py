"""Tensors of a GGUF file: blocks read in formats of ours, and floats."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from qgraph.checkpoints.base import Entry
from qgraph.checkpoints.gguf_blocks import BlockType
from qgraph.checkpoints.tensors import StoredTensor
from qgraph.errors import InputError
from qgraph.formats.base import Array, Format, QuantizedWeight
from qgraph.formats.minimums import MINIMUMS, zero_points


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class GgufEntry(Entry):
    """A quantized tensor of a GGUF file.

    type: ggml's.
    places: the row of the file that each row is, int64 `[N]`; None where they lie in order.
    """

    type: BlockType
    places: Array | None = None

    def rows(self, start: int, stop: int) -> QuantizedWeight:
        """See `Entry.rows`."""
        found = self.type.decode(self.packed(start, stop))
        codes, scales = found.codes.reshape(-1, self.k), self._grid(found.scales, start)
        if found.minimums is None:
            return QuantizedWeight(codes, scales.astype(self.scale_dtype.numpy(), copy=False))
        least = self._grid(found.minimums, start)
        return moved(codes, scales, least, self.format, self.type.bits)

    def dequantized(self, start: int, stop: int) -> Array:
        """See `Entry.dequantized`."""
        return self.type.dequantized(self.packed(start, stop)).reshape(-1, self.k)

    def packed(self, start: int, stop: int) -> Array:
        """The blocks of some rows, u8 `[m, nbytes]`."""
        data = rows_of(self.stored["blocks"], self.places, start, stop)
        return data.reshape(-1, self.type.nbytes)

    def _grid(self, values: Array, row: int) -> Array:
        """Scales or minimums as float32 `[n, nb]`, of rows from `row` on."""
        values = values.reshape(-1, self.k // self.type.group)
        bad = np.argwhere(~np.isfinite(values))
        if len(bad):
            at, tensor = bad[0], self.stored["blocks"]
            raise InputError(
                f"{tensor.path}: {tensor.name} holds the scale {values[tuple(at)]} in group "
                f"{at[1]} of row {row + at[0]}, wanted finite numbers: the file is damaged, or was "
                "made from weights that were"
            )
        return values


def moved(codes: Array, scales: Array, least: Array, fmt: Format, bits: int) -> QuantizedWeight:
    """What scale·code + minimum is as a float-zero weight: see `formats.minimums`.

    codes: uint8 `[n, K]` of `bits` bits, put around the middle of the format's, so that the numbers
    which kernels multiply are small. scales, least: float32 `[n, nb]`. The minimum, moved to the
    middle of the codes, is exact in float64, and kept so where float32 would round it. A group
    without a scale is its minimum times a code of 1, which float zero points can say too.
    """
    middle, own = 1 << (fmt.bits - 1), 1 << (bits - 1)
    constant = (scales == 0) & (least != 0)
    if constant.any():
        codes = np.where(np.repeat(constant, fmt.group, axis=1), np.uint8(1), codes)
        scales, least = np.where(constant, least, scales), np.where(constant, 0, least)
    exact = least + scales.astype(np.float64) * own
    minimums = exact.astype(np.float32)
    more = {MINIMUMS: minimums if np.array_equal(minimums, exact) else exact}
    zeros = zero_points(scales, exact, middle)
    return QuantizedWeight(codes + np.uint8(middle - own), scales, zeros, more)


@dataclasses.dataclass(frozen=True)
class GgufFloats:
    """An unquantized tensor under its parameter's name, rows in the parameter's order.

    added: what the file's numbers are more than the parameter's.
    """

    name: str
    stored: StoredTensor
    places: Array | None = None
    added: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """See `FloatTensor.shape`."""
        return self.stored.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """See `FloatTensor.dtype`."""
        return self.stored.dtype

    def rows(self, start: int, stop: int) -> Array:
        """See `FloatTensor.rows`."""
        found = rows_of(self.stored, self.places, start, stop)
        if self.added:
            found -= found.dtype.type(self.added)
        return found


def rows_of(stored: StoredTensor, places: Array | None, start: int, stop: int) -> Array:
    """Rows `start:stop`, each of which lies at its place; of experts, counted through.

    stored: `[N, …]`, or `[E, N, …]` without places.
    """
    if len(stored.shape) > 2:
        stored = stored.matrix()
    if places is None:
        return stored.rows(start, stop)
    wanted = places[start:stop]
    first = int(wanted.min())
    found: Array = stored.rows(first, int(wanted.max()) + 1)[wanted - first]
    return found
