"""Weights in memory, rounded: entries that layouts can write."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from qgraph.checkpoints.base import SourceEntry
from qgraph.formats.base import Array, parse
from qgraph.rounding import RoundingSource


class ArraySource(RoundingSource):
    """Rows of an array, rounded."""

    def __init__(self, weight: Array, fmt: str, scale_dtype: ir.DataType) -> None:
        super().__init__()
        self.weight, self.format, self.scale_dtype = weight, parse(fmt), scale_dtype
        (self.n, self.k), self.name = weight.shape, "weight"

    def read(self, start: int, stop: int) -> Array:
        """See `RoundingSource.read`."""
        return self.weight[start:stop]


def rounded(
    name: str,
    n: int,
    k: int,
    fmt: str,
    scale_dtype: ir.DataType = ir.DataType.FLOAT16,
    **more: Any,
) -> SourceEntry:
    """A random weight, rounded to `fmt`; rows of different size, so that scales differ."""
    rng = np.random.default_rng(n + k)
    weight = rng.standard_normal((n, k)) * rng.uniform(0.1, 3, (n, 1)) + rng.uniform(-1, 1, (n, 1))
    return SourceEntry.of(ArraySource(weight.astype(np.float32), fmt, scale_dtype), name, **more)
