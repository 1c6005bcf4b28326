"""Quantized weights whose scales are to be stored as float16, whatever a graph has."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx_ir as ir

from qgraph.errors import InputError
from qgraph.formats.base import Array, QuantizedWeight
from qgraph.lost_weights import WIDER, Tally
from qgraph.quant_tensor import Deviation, QuantSource


class HalfScales(QuantSource):
    """The codes of another source, its scales (and float zero points) rounded to float16.

    That moves a weight by at most its size times 2^-11, far less than half a step of 4 bits.
    """

    def __init__(self, source: QuantSource, name: str) -> None:
        self.source = source
        self.format, self.n, self.k = source.format, source.n, source.k
        self.scale_dtype, self.name = ir.DataType.FLOAT16, name

    def block(self, start: int, stop: int) -> QuantizedWeight:
        """Rows `start:stop`.

        Raises:
            InputError: a scale, or a zero point, that is beyond float16.
        """
        found = self.source.block(start, stop)
        zeros = found.zeros
        with np.errstate(over="ignore", under="ignore"):
            scales = found.scales.astype(np.float16)
            if zeros is not None and zeros.dtype.kind == "f":
                zeros = zeros.astype(np.float16)
        self._check(found.scales, scales, "scale")
        self._check(found.zeros, zeros, "zero point")
        return dataclasses.replace(found, scales=scales, zeros=zeros)

    def _check(self, own: Array | None, half: Array | None, what: str) -> None:
        if own is None or half is None or np.isfinite(half).all():
            return
        raise InputError(
            f"{self.name}: its {what} {own[~np.isfinite(half)][0]:g} is beyond float16, in which "
            f"the layout stores it: keep it in float with --exclude '{self.name}'{WIDER}"
        )

    def is_exact(self) -> bool:
        """Whether float16 holds all scales and zero points as they are."""
        for start, stop in self.blocks():
            found, whole = self.block(start, stop), self.source.block(start, stop)
            if not np.array_equal(found.scales, whole.scales):
                return False
            if not _equal(found.zeros, whole.zeros):
                return False
        return True

    def check_left(self) -> None:
        """Refuse a weight of which float16 holds nothing.

        Raises:
            InputError: see `Tally.check`.
        """
        tally = Tally()
        for start, stop in self.blocks():
            tally.add(self, start, stop, self.block(start, stop))
        tally.check(self.name, "float16")

    def deviation(self, start: int, stop: int, weight: QuantizedWeight) -> Deviation:
        """See `QuantSource.deviation`; the other source says how far it may be off."""
        return self.source.deviation(start, stop, weight)

    def release(self) -> None:
        """See `QuantSource.release`."""
        self.source.release()


def _equal(one: Array | None, other: Array | None) -> bool:
    return one is None or other is None or bool(np.array_equal(one, other))
