"""Quantized parameters of a checkpoint as what they stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from qgraph.checkpoints.base import Entry
from qgraph.formats.base import Array


@dataclasses.dataclass(frozen=True, eq=False)
class PackedFloats:
    """The float32 numbers of a quantized parameter: see `FloatTensor`."""

    entry: Entry

    @property
    def name(self) -> str:
        """The parameter."""
        return self.entry.name

    @property
    def shape(self) -> tuple[int, ...]:
        """`(N, K)` or `(E, N, K)`."""
        return self.entry.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32."""
        return np.dtype(np.float32)

    def rows(self, start: int, stop: int) -> Array:
        """The slices `start:stop` of axis 0, read now."""
        per = self.entry.n if self.entry.experts is not None else 1
        found = self.entry.dequantized(start * per, stop * per)
        return found.reshape(stop - start, *self.shape[1:])
