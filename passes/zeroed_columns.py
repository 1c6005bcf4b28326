"""A quantized weight without some of its input columns, which are multiplied in float."""

from __future__ import annotations

import dataclasses

import numpy as np

from qgraph.formats.base import Array, QuantizedWeight
from qgraph.passes.rounded import RoundedSource
from qgraph.quant_tensor import Deviation, QuantSource


class ZeroedColumns(QuantSource):
    """The rows of another source with codes of zero in some columns.

    columns: int64, ascending.
    """

    def __init__(self, source: QuantSource, columns: Array) -> None:
        self.source, self.columns = source, columns
        self.format, self.n, self.k = source.format, source.n, source.k
        self.scale_dtype, self.name = source.scale_dtype, source.name
        self.output_error = source.output_error

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`."""
        found = self.source.block(start, stop)
        codes = found.codes.copy(order="K")
        codes[:, self.columns] = 0
        return dataclasses.replace(found, codes=codes)

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """Zeros there, and elsewhere what the source says of its own codes."""
        codes = weight.codes.copy(order="K")
        empty = not codes[:, self.columns].any()
        codes[:, self.columns] = self.source.block(start, stop).codes[:, self.columns]
        found = self.source.deviation(start, stop, dataclasses.replace(weight, codes=codes))
        return found if empty else dataclasses.replace(found, worst=float("inf"))

    def release(self) -> None:
        """See `QuantSource.release`."""
        self.source.release()


def float_columns(source: QuantSource, columns: Array) -> Array:
    """The weight in some columns, float32 `[C, N]`.

    As it came, where it was rounded to nearest; else what its codes stand for: solvers choose the
    other columns to make up for their errors.
    """
    found = np.empty((len(columns), source.n), np.float32)
    for start, stop in source.blocks():
        if isinstance(source, RoundedSource):
            rows = source.weight.rows(start, stop)
        else:
            rows = source.format.dequantize(source.block(start, stop))
        found[:, start:stop] = rows[:, columns].T
    source.release()
    return found
