"""Quantized weights whose scales are to be stored as float16, whatever a graph has."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.formats.base import Array, QuantizedWeight
from qgraph.quant_tensor import Deviation, QuantSource


class HalfScales(QuantSource):
    """The codes of another source, its scales (and float zero points) rounded to float16.

    That moves a weight by at most its size times 2^-11, far less than half a step of 4 bits.
    """

    def __init__(self, source: QuantSource) -> None:
        self.source = source
        self.format, self.n, self.k = source.format, source.n, source.k
        self.scale_dtype, self.name = ir.DataType.FLOAT16, source.name

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`.

        Raises:
            InputError: a scale that is beyond float16.
        """
        found = self.source.block(start, stop)
        with np.errstate(over="ignore", under="ignore"):
            scales = found.scales.astype(np.float16)
        zeros = found.zeros
        if zeros is not None and zeros.dtype.kind == "f":
            zeros = zeros.astype(np.float16)
        if not np.isfinite(scales).all():
            worst = float(np.abs(found.scales).max())
            raise InputError(
                f"{self.name}: its scale {worst:g} is beyond float16, in which it lies"
            )
        return dataclasses.replace(found, scales=scales, zeros=zeros)

    def is_exact(self) -> bool:
        """Whether float16 holds all scales and zero points as they are."""
        for start, stop in self.blocks():
            found, whole = self.block(start, stop), self.source.block(start, stop)
            if not np.array_equal(found.scales, whole.scales):
                return False
            if not _equal(found.zeros, whole.zeros):
                return False
        return True

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """See `QuantSource.deviation`; the other source says how far it may be off."""
        return self.source.deviation(start, stop, weight)

    def release(self) -> None:
        """See `QuantSource.release`."""
        self.source.release()


def _equal(one: Array | None, other: Array | None) -> bool:
    return one is None or other is None or bool(np.array_equal(one, other))
